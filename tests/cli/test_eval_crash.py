"""An evaluation that was killed with `kill -9` is resumed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent_loop.recording.record import RecordKind
from agent_loop.storage import StoredRun
from agent_loop.storage.json_lines import read_lines
from tests.cli.scripted_eval import make_eval_project
from tests.rollout.journaled import records_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

EVAL = [sys.executable, "-c", "from agent_loop.cli import main; main()", "eval", "config.yaml"]


def num_ended(journal: Path) -> int:
    return (
        sum(r["is"] == RecordKind.END for r in records_of(journal.read_bytes())) if journal.is_file() else 0
    )


def test_a_killed_evaluation_resumes_and_runs_nothing_twice(tmp_path: Path) -> None:
    make_eval_project(tmp_path)
    (tmp_path / "hang").write_text("135")
    lines = tmp_path / "runs" / "eval" / "trajectories.jsonl"
    running = subprocess.Popen(
        EVAL, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    give_up_at = time.monotonic() + 150
    while num_ended(lines.with_name("rollout.journal")) < 6 or len(lines.read_text().splitlines()) < 6:
        if running.poll() is not None or time.monotonic() > give_up_at:
            running.kill()
            raise AssertionError(running.communicate()[0])
        time.sleep(0.02)
    running.kill()
    running.communicate()
    (tmp_path / "hang").unlink()
    before = {row["trajectory_id"]: row["segments"] for row in read_lines(lines)}

    done = subprocess.run([*EVAL, "--resume"], cwd=tmp_path, capture_output=True, text=True, timeout=200)

    assert done.returncode == 0, done.stdout + done.stderr
    after = {row["trajectory_id"]: row["segments"] for row in StoredRun(lines.parent).rows()}
    assert len(after) == 12
    assert not lines.exists()
    assert {name: after[name] for name in before} == before
    calls = [line.split()[0] for line in (tmp_path / "calls.log").read_text().splitlines()]
    assert [calls.count(number) for number in "024"] == [2, 2, 2]
    assert [calls.count(number) for number in "135"] == [4, 4, 4]  # The rows that did not end were run again.
    assert (lines.parent / "summary.json").is_file()
    assert not (lines.parent / "rollout.journal").exists()

"""Output paths are checked first and locked by one run, and results survive a failed write."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from agent_loop.recording.record import RecordKind
from agent_loop.storage.exclusive import exclusive_file, exclusive_folder
from tests.cli.project import Command, Result
from tests.rollout.journaled import records_of

IN_THE_WAY = """
import os
from pathlib import Path

def reward(output, row):
    \"""Puts a folder where the output goes, once the rollout has begun.\"""
    with open("calls.log", "a") as log:
        log.write("x")
    os.makedirs(Path(Path("target").read_text(), "in the way"), exist_ok=True)
    return 1.0
"""


@pytest.fixture
def blocked(command: Command) -> Command:
    """Return a command in a project whose output cannot be written at the end. The file `target` holds the path."""
    Path("blocks.py").write_text(IN_THE_WAY)

    def run(*arguments: str) -> Result:
        return command(arguments[0], "config.yaml", "reward.function=blocks.py:reward", *arguments[1:])

    return run


def block(path: str) -> None:
    Path("target").write_text(path)


@pytest.mark.parametrize("out", ["rows.jsonl/out.jsonl", "/proc/out.jsonl", ".", "/proc/out.parquet"])
def test_a_rollout_with_an_unwritable_output_does_not_start(command: Command, out: str) -> None:
    Path("task.py").write_text(
        "from pathlib import Path\ndef reward(output, row):\n    Path('ran').touch()\n    return 1.0\n"
    )
    result = command("rollout", "config.yaml", "--out", out, "rollout.journal=false")
    assert result.exit_code == 2
    assert f"Error: --out is {out!r}, which" in result.err
    assert not Path("ran").exists()


@pytest.mark.parametrize("out", ["rows.jsonl/run", "/proc/run"])
def test_an_unwritable_folder_is_reported_before_the_rollout(command: Command, out: str) -> None:
    evaluated = command("eval", "config.yaml", "--out", out)
    trained = command("train", "config.yaml", f"trainer.run_dir={out}")
    assert (evaluated.exit_code, trained.exit_code) == (2, 2)
    assert f"OutputError: --out is '{out}', which cannot be written or locked" in evaluated.err
    assert f"Error: trainer.run_dir is '{out}', " in trained.err


def test_only_regular_files_are_replaced(command: Command) -> None:
    Path("pairs.jsonl").symlink_to("rows.jsonl")
    rows = Path("rows.jsonl").read_bytes()
    assert command("rollout", "config.yaml", "--out", "pairs.jsonl").exit_code == 2
    assert command("rollout", "config.yaml", "--out", "sampled.parquet", "--max-rows", "1").exit_code == 0
    paired = command("export", "sampled.parquet", "--pairs", "--out", "pairs.jsonl")
    exported = command("view", "sampled.parquet", "--export", "pairs.jsonl")
    assert "'pairs.jsonl' cannot be used (it is not a regular file)" in paired.err
    assert "--export 'pairs.jsonl' cannot be written (it is not a regular file)" in exported.err
    assert Path("pairs.jsonl").is_symlink()
    assert Path("rows.jsonl").read_bytes() == rows


def test_a_full_disk_is_reported_before_the_run_starts(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", fail)
    trained = command("train", "config.yaml")
    assert trained.exit_code == 2
    assert "trainer.run_dir is 'run', which cannot be written or locked (OSError: [Errno 28]" in trained.err
    assert not Path("run").exists()


def test_a_second_run_with_the_same_output_is_refused_and_the_first_is_named(command: Command) -> None:
    with (
        exclusive_folder(Path("run"), name="trainer.run_dir"),
        exclusive_file(Path("sampled.jsonl"), name="--out"),
        exclusive_folder(Path("runs/eval"), name="--out"),
    ):
        results = [
            command("train", "config.yaml"),
            command("train", "config.yaml", "--resume"),
            command("train", "config.yaml", "--overwrite"),
            command("rollout", "config.yaml", "--out", "sampled.jsonl"),
            command("eval", "config.yaml"),
            command("eval", "config.yaml", "--overwrite"),
        ]
    for result in results:
        assert result.exit_code == 2
        assert f"which another run is writing: process {os.getpid()} on" in result.err
    assert not Path("sampled.jsonl").exists()


@pytest.mark.parametrize("out", ["sampled.jsonl", "sampled.parquet"])
def test_an_output_that_cannot_be_written_at_the_end_is_in_the_journal(blocked: Command, out: str) -> None:
    block(out)
    result = blocked("rollout", "--out", out, "-n", "1")
    assert result.exit_code == 2
    assert f"--out is '{out}', which cannot be written" in result.err
    assert f"the trajectories are in the journal '{out}.journal'" in result.err
    num_scored = len(Path("calls.log").read_text())

    shutil.rmtree(out)
    resumed = blocked("rollout", "--out", out, "-n", "1", "--resume")
    assert resumed.exit_code == 0, resumed.err
    assert len(Path("calls.log").read_text()) == num_scored
    assert Path(out).is_file()
    assert not Path(f"{out}.journal").exists()


@pytest.mark.parametrize("out", ["sampled.jsonl", "sampled.parquet"])
def test_without_a_journal_trajectories_are_written_to_another_file_that_the_error_names(
    blocked: Command, out: str
) -> None:
    block(out)
    result = blocked("rollout", "--out", out, "-n", "1", "rollout.journal=false")
    assert result.exit_code == 2
    [spare] = re.findall(r"the trajectories are in '(.*)', as JSON lines", result.err)
    assert len([json.loads(line) for line in Path(spare).read_text().splitlines()]) == 6
    shutil.rmtree(Path(spare).parent)


def test_the_journal_of_an_earlier_rollout_is_kept_under_another_name(command: Command) -> None:
    journal = Path("sampled.jsonl.journal")
    for number in (1, 2):
        journal.write_bytes(b"an hour of turns %d" % number)
        result = command("rollout", "config.yaml", "--out", "sampled.jsonl", "-n", "1", "--max-rows", "1")
        assert result.exit_code == 0, result.err
        assert f"its journal is now sampled.jsonl.journal.before-{number}" in " ".join(result.out.split())
    kept = [Path(f"{journal}.before-{number}").read_bytes() for number in (1, 2)]
    assert kept == [b"an hour of turns 1", b"an hour of turns 2"]


def test_an_evaluation_with_an_unwritable_summary_resumes_from_its_journal(blocked: Command) -> None:
    block("runs/eval/summary.json")
    result = blocked("eval", "-n", "1")
    assert result.exit_code == 2
    assert "OutputError: 'runs/eval' cannot be written" in result.err
    assert "run the same command with --resume" in " ".join(result.err.split())
    ended = [
        r for r in records_of(Path("runs/eval/rollout.journal").read_bytes()) if r["is"] == RecordKind.END
    ]
    num_scored = len(Path("calls.log").read_text())
    assert len(ended) == num_scored == 6

    shutil.rmtree("runs/eval/summary.json")
    resumed = blocked("eval", "-n", "1", "--resume")
    assert resumed.exit_code == 0, resumed.err
    assert len(Path("calls.log").read_text()) == num_scored
    assert Path("runs/eval/summary.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "rows_of"),
    [
        (["--on", "train", "data.val_files=[]"], "data.train_files"),
        ([], "data.val_files"),
        (["--data", "rows.jsonl", "data.val_files=[]"], "--data"),
    ],
)
def test_an_evaluation_names_its_rows_in_the_first_line_and_in_the_summary(
    command: Command, arguments: list[str], rows_of: str
) -> None:
    result = command("eval", "config.yaml", "-n", "1", "--max-rows", "2", *arguments)
    assert result.exit_code == 0, result.err
    assert result.out.splitlines()[0] == f"rows of {rows_of}: rows.jsonl"
    assert json.loads(Path("runs/eval/summary.json").read_text())["rows_of"] == rows_of

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.project import make_project

pytestmark = pytest.mark.slow

TRAIN = [sys.executable, "-c", "from agent_loop.cli import main; main()", "train", "config.yaml"]


def test_ctrl_c_stops_at_once_and_resume_continues_at_the_same_step(tmp_path: Path) -> None:
    make_project(tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    running = subprocess.Popen(
        [*TRAIN, "trainer.total_steps=100000", "trainer.save_every=100000"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith("step 3/"):
            break
    running.send_signal(signal.SIGINT)
    output = running.communicate(timeout=60)[0]
    assert running.returncode == 130, output
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    last = steps[-1]
    assert last < 100, "the run stops in the step of the interrupt"
    assert steps == list(range(1, last + 1))
    assert (tmp_path / "run" / "checkpoints" / f"step-{last:06d}").is_dir()
    subprocess.run(
        [*TRAIN, "--resume", f"trainer.total_steps={last + 2}"], cwd=tmp_path, check=True, timeout=60
    )
    resumed = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert resumed == list(range(1, last + 3))

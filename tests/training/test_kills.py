"""Repeated `kill -9` during a training run."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from agent_loop.training.metrics import read_metrics
from tests.cli.project import make_project
from tests.harness import is_nightly

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

NUM_KILLS = 10 if is_nightly() else 4
NUM_ROWS, ROWS_PER_STEP, SAMPLES = 6, 2, 2

TRAIN = """
import json
import os
import sys

from agent_loop.cli import main
from agent_loop.training.ppo_trainer import TrainingLoop

learn = TrainingLoop._learn

def learn_and_tell(self, rollout):
    metrics = learn(self, rollout)
    trained = [[trajectory.row["number"], trajectory.rollout] for trajectory in rollout.trajectories]
    with open("trained.log", "a") as file:
        file.write(json.dumps({"pid": os.getpid(), "rows": trained}) + chr(10))
    return metrics

TrainingLoop._learn = learn_and_tell
sys.argv = ["agent-loop", "train", "config.yaml", *sys.argv[1:]]
main()
"""


def make_training(folder: Path, *, total_steps: int) -> None:
    path = make_project(folder)
    rows = [{"prompt": f"question {n}", "number": n} for n in range(NUM_ROWS)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "train.py").write_text(TRAIN)
    settings = yaml.safe_load(path.read_text())
    settings["data"] |= {"shuffle": False}
    settings["trainer"] |= {
        "mode": "async",
        "max_staleness": 2,
        "total_steps": total_steps,
        "save_every": 1,
    }
    path.write_text(yaml.safe_dump(settings))


def started(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "train.py", "--resume"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def steps_of(folder: Path) -> list[int]:
    path = folder / "run" / "metrics.jsonl"
    return [line["step"] for line in read_metrics(path)] if path.exists() else []


def rows_of(step: int) -> list[list[int]]:
    first = (step - 1) * ROWS_PER_STEP
    return [[(first + row) % NUM_ROWS, sample] for row in range(ROWS_PER_STEP) for sample in range(SAMPLES)]


def test_a_training_that_is_killed_again_and_again_loses_at_most_a_step_each_time(tmp_path: Path) -> None:
    rng = random.Random(7)
    make_training(tmp_path, total_steps=100_000)
    first_steps: dict[int, int] = {}
    """First step of each process."""
    for _ in range(NUM_KILLS):
        before = steps_of(tmp_path)
        process = started(tmp_path)
        assert process.stdout is not None
        output = ""
        for line in process.stdout:
            output += line
            if re.match(r"step \d+/", line):  # a step has ended
                break
        time.sleep(rng.uniform(0, 1.5))
        process.kill()
        process.communicate()
        resumed_after = re.search(r"resuming after step (\d+)", output)
        assert "step " in output, output
        first_steps[process.pid] = int(resumed_after[1]) + 1 if resumed_after else 1
        assert first_steps[process.pid] - 1 >= max(before, default=0) - 1, output

    last = max(steps_of(tmp_path))
    subprocess.run(
        [sys.executable, "train.py", "--resume", f"trainer.total_steps={last + 3}"],
        cwd=tmp_path,
        check=True,
        timeout=100,
        capture_output=True,
    )

    assert steps_of(tmp_path) == list(range(1, last + 4))
    for pid, first_step in first_steps.items():
        lines = map(json.loads, (tmp_path / "trained.log").read_text().splitlines())
        trained = [line["rows"] for line in lines if line["pid"] == pid]
        assert trained
        assert trained == [rows_of(first_step + number) for number in range(len(trained))]

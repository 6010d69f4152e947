"""A run with a teacher in two processes learns what it learns in one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from agent_loop.training import metrics as names
from agent_loop.training.metrics import read_metrics
from tests.cli.project import make_project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_two_processes_compute_the_divergences_of_one(tmp_path: Path) -> None:
    path = make_project(tmp_path)
    settings = yaml.safe_load(path.read_text())
    teacher = {"hint": "Say hello.", "context_length": 128}
    settings["distillation"] = {"teachers": {"hinted": teacher}, "top_k": 8, "reward_coef": 0}
    settings["rollout"]["n"] = 2
    path.write_text(yaml.safe_dump(settings))

    found: list[list[float]] = []
    for num_processes in (1, 2):
        folder = tmp_path / f"run{num_processes}"
        options = [f"trainer.num_processes={num_processes}", f"trainer.run_dir={folder}"]
        command = [sys.executable, "-m", "agent_loop", "train", str(path), *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = list(read_metrics(folder / "metrics.jsonl"))
        found.append([line[names.TEACHER_KL + "hinted"] for line in lines])

    assert found[0][0] > 0
    assert found[1] == pytest.approx(found[0], rel=2e-2)

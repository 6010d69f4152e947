"""A supervised run that is killed resumes to the same numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from agent_loop.training import metrics as names
from agent_loop.training.metrics import read_metrics
from tests.cli.project import make_project
from tests.helpers import user

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOTAL_STEPS = 12


def make_run(folder: Path) -> None:
    folder.mkdir()
    path = make_project(folder)
    chats = [{"messages": [*user(f"{n}?"), {"role": "assistant", "content": f"{n}"}]} for n in range(20)]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    settings = yaml.safe_load(path.read_text())
    settings["sft"] = {"files": ["chats.jsonl"], "batch_size": 4}
    settings["trainer"] |= {"total_steps": TOTAL_STEPS, "save_every": 3}
    path.write_text(yaml.safe_dump(settings))


def started(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "agent_loop", "sft", "config.yaml", "--resume"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(folder: Path) -> dict[int, float]:
    """Run the training to its end and return its losses by step."""
    process = started(folder)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return {line["step"]: line[names.SFT_LOSS] for line in read_metrics(folder / "run" / "metrics.jsonl")}


def test_a_run_that_is_killed_between_checkpoints_resumes_to_the_same_losses(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    make_run(whole)
    make_run(killed)
    for step in (5, 8):
        process = started(killed)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(f"step {step}/"):
                break
        process.kill()
        process.communicate()

    losses = finished(killed)

    assert sorted(losses) == list(range(1, TOTAL_STEPS + 1))
    assert losses == finished(whole)

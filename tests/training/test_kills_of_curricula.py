"""`kill -9` during runs whose rows depend on the results so far."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_loop.training.checkpoint import latest_checkpoint
from tests.cli.project import make_project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_KILLS, TOTAL_STEPS = 2, 8
CURRICULUM = {"name": "curriculum", "floor": 0.05, "success": "reward", "skip_failed": 2, "skip_for": 3}
REPLAY = {"name": "curriculum", "replay_share": 0.5, "replay_max_age": 5}

REWARD = """
def reward(output, row):
    return float(sum(output.response_ids.tolist()) % 2)
"""
TRAIN = """
import json
import os
import sys

from agent_loop.cli import main
from agent_loop.training.loop import TrainingLoop

learn = TrainingLoop._learn

def learn_and_tell(self, rollout):
    result = learn(self, rollout)
    trained = [
        [trajectory.row["number"], trajectory.output.response_ids.tolist()]
        for trajectory in [*rollout.trajectories, *rollout.replayed]
    ]
    with open("trained.log", "a") as file:
        file.write(json.dumps({"step": self.run.completed + 1, "trained": trained}) + chr(10))
    return result

TrainingLoop._learn = learn_and_tell
sys.argv = ["agent-loop", "train", "config.yaml", *sys.argv[1:]]
main()
"""


def make_training(folder: Path, *, sampler: dict[str, Any], **trainer: Any) -> None:
    folder.mkdir()
    path = make_project(folder)
    rows = [{"prompt": f"question {n}", "number": n} for n in range(9)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "task.py").write_text(REWARD)
    (folder / "train.py").write_text(TRAIN)
    settings = yaml.safe_load(path.read_text())
    settings["data"] |= {"sampler": sampler}
    settings["rollout"] |= {"deterministic": "mode" not in trainer}
    settings["trainer"] |= {"total_steps": TOTAL_STEPS, "save_every": 3, "max_dead_steps": None, **trainer}
    path.write_text(yaml.safe_dump(settings))


def train(folder: Path) -> None:
    subprocess.run(
        [sys.executable, "train.py", "--resume"], cwd=folder, check=True, capture_output=True, timeout=300
    )


def train_and_kill(folder: Path, *, rng: random.Random) -> None:
    """Start the training, and kill it a moment after its first or second step."""
    process = subprocess.Popen(
        [sys.executable, "train.py", "--resume"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    num_steps = rng.randint(1, 2)
    for line in process.stdout:
        num_steps -= line.startswith("step ")
        if not num_steps:
            break
    time.sleep(rng.uniform(0, 0.5))
    process.kill()
    process.communicate()


def trained_in(folder: Path) -> dict[int, list[Any]]:
    """Return what each step trained, in each process that reached it."""
    steps: defaultdict[int, list[Any]] = defaultdict(list)
    for line in map(json.loads, (folder / "trained.log").read_text().splitlines()):
        steps[line["step"]].append(line["trained"])
    return steps


@pytest.mark.parametrize("sampler", [CURRICULUM, REPLAY])
def test_a_killed_curriculum_trains_the_same_rows_to_the_same_weights(
    tmp_path: Path, sampler: dict[str, Any]
) -> None:
    rng = random.Random(3)
    make_training(tmp_path / "whole", sampler=sampler)
    make_training(tmp_path / "killed", sampler=sampler)
    train(tmp_path / "whole")

    for _ in range(NUM_KILLS):
        train_and_kill(tmp_path / "killed", rng=rng)
    train(tmp_path / "killed")

    whole, killed = trained_in(tmp_path / "whole"), trained_in(tmp_path / "killed")
    assert sorted(whole) == sorted(killed) == list(range(1, TOTAL_STEPS + 1))
    assert all(trained == whole[step][0] for step, found in killed.items() for trained in found)
    weights = [
        (latest_checkpoint(tmp_path / name / "run").model_path / "model.safetensors").read_bytes()
        for name in ("whole", "killed")
    ]
    assert weights[0] == weights[1]


def test_an_asynchronous_curriculum_trains_a_step_again_with_the_same_rows(tmp_path: Path) -> None:
    rng = random.Random(5)
    make_training(tmp_path / "killed", sampler=CURRICULUM, mode="async", max_staleness=2)

    for _ in range(NUM_KILLS):
        train_and_kill(tmp_path / "killed", rng=rng)
    train(tmp_path / "killed")

    killed = trained_in(tmp_path / "killed")
    assert sorted(killed) == list(range(1, TOTAL_STEPS + 1))
    assert any(len(found) > 1 for found in killed.values())
    assert all(trained == found[0] for found in killed.values() for trained in found)

"""Training runs with `adv_estimator: fork`: alone, asynchronous, and killed in the middle of the forks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_loop.training import metrics as names
from agent_loop.training.metrics import read_metrics
from tests.cli.project import make_project

KILLED_AFTER = 3
"""Continuations of the second step that have ended when the process is killed."""

TASK = """
from agent_loop import AgentLoopBase, register


@register("three_turns")
class ThreeTurns(AgentLoopBase):
    async def run(self, sampling_params, **row):
        async with self.episode(row["raw_prompt"]) as episode:
            await episode.generate(sampling_params)
            for _ in range(2):
                await episode.observe([{"role": "user", "content": "go on"}])
                await episode.generate(sampling_params)
        return episode.output()


def reward(output, row):
    return float(int(output.response_ids[-1]) % 3)
"""

TRAIN = f"""
import os
import signal

from agent_loop.cli import main
from agent_loop.rollout.manager import AgentLoopManager

run_forks = AgentLoopManager.run_forks

async def run_until_killed(self, forks, *, on_trajectory, label, **options):
    ended = []

    def note(trajectory):
        ended.append(trajectory)
        on_trajectory(trajectory)
        if os.environ.get("KILLED") and label.startswith("step=2") and len(ended) == {KILLED_AFTER}:
            os.kill(os.getpid(), signal.SIGKILL)

    return await run_forks(self, forks, on_trajectory=note, label=label, **options)

AgentLoopManager.run_forks = run_until_killed
main()
"""


def make_training(folder: Path, **trainer: Any) -> None:
    folder.mkdir(exist_ok=True)
    path = make_project(folder)
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    (folder / "task.py").write_text(TASK, encoding="utf-8")
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    settings["rollout"] |= {
        "n": 3,
        "prompt_length": 64,
        "response_length": 64,
        "agent": {"default_agent_loop": "three_turns", "loop_files": ["task.py"]},
        "multi_turn": {"max_turn_tokens": 3},
    }
    settings["algorithm"] = {
        "adv_estimator": "fork",
        "fork": {"choice": "every"},
        "drop_zero_variance_groups": False,
    }
    settings["trainer"] |= {"total_steps": 3, "save_every": 3, **trainer}
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")


def train(folder: Path, *overrides: str, is_killed: bool = False) -> str:
    """Train in a new process, and return its output."""
    process = subprocess.run(
        [sys.executable, "train.py", "train", "config.yaml", *overrides],
        cwd=folder,
        env={**os.environ, "KILLED": "1" if is_killed else ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert process.returncode == (-signal.SIGKILL if is_killed else 0), process.stdout
    return process.stdout


def lines_of(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of each step that do not depend on time."""
    timed = ("timing", "time/", "perf/", "agent_loop/", "storage/")
    lines = read_metrics(folder / "run" / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in lines]


@pytest.mark.slow
def test_a_run_reports_the_cost_of_its_forks_and_trains_each_token_once(tmp_path: Path) -> None:
    make_training(tmp_path, total_steps=2)
    train(tmp_path)
    first, second = lines_of(tmp_path)
    for line in (first, second):
        # Each trajectory has three turns of three tokens: two states, and two continuations of each.
        assert line[names.FORK_STATES] == 2 * 6
        assert line[names.FORK_CONTINUATIONS] == 2 * 2 * 6
        assert line[names.FORK_TOKENS] == 2 * 6 * (6 + 3)
        assert line[names.FORK_LOST_SHARE] == 0
        assert line[names.ROWS_TRAINED] > 0


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_run_that_is_killed_in_the_middle_of_its_forks_resumes_to_the_same_numbers(tmp_path: Path) -> None:
    settings = ["rollout.deterministic=true", "actor.lr=0.01"]
    for name in ("whole", "killed"):
        make_training(tmp_path / name)
    train(tmp_path / "whole", *settings)

    train(tmp_path / "killed", *settings, is_killed=True)
    output = train(tmp_path / "killed", *settings, "--resume")

    assert "continuations are in the journal" in output
    assert lines_of(tmp_path / "killed") == lines_of(tmp_path / "whole")


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_workers_of_a_cluster_continue_trajectories(tmp_path: Path) -> None:
    make_training(tmp_path, total_steps=2, runtime="ray")
    cpus = [f"trainer.ray.num_cpus_per_{kind}=0.01" for kind in ("server", "worker", "learner")]
    train(tmp_path, *cpus, "rollout.agent.num_workers=2", "rollout.engine_kwargs.num_threads=1")
    for line in lines_of(tmp_path):
        assert line[names.FORK_TOKENS] > 0
        assert line[names.FORK_LOST_SHARE] == 0

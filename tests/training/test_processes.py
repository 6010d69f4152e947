"""Real processes: killed again and again, forked, and two that train together as one."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from msgspec import structs
from torch import Tensor

from agent_loop.config import Config
from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.training import metrics as names
from agent_loop.training.checkpoint import open_checkpoint, save_checkpoint
from agent_loop.training.learner import load_learner
from agent_loop.training.metrics import read_metrics
from agent_loop.training.ranks import start_process_group
from agent_loop.trajectory import AgentLoopOutput, Feedback, Trajectory
from agent_loop.types import Origin
from agent_loop.weights.adapted import AdaptedWeights
from tests.cli.project import make_project
from tests.harness import is_nightly
from tests.listeners import is_loopback, listening_addresses, process_tree
from tests.training.fakes import PAD, sample_trajectories, tiny_policy, tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

TRAIN = [sys.executable, "-m", "agent_loop", "train", "config.yaml"]


def change_settings(folder: Path, **sections: dict[str, Any]) -> None:
    """Write a project into the folder, and set values of its settings."""
    folder.mkdir(exist_ok=True)
    path = make_project(folder)
    settings = yaml.safe_load(path.read_text())
    for section, values in sections.items():
        settings[section] = settings.get(section, {}) | values
    path.write_text(yaml.safe_dump(settings))


def run(
    command: list[str], folder: Path, *, returncode: int = 0, **env: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == returncode, done.stdout + done.stderr
    return done


def started(command: list[str], folder: Path, *, until: str) -> tuple[subprocess.Popen[str], str]:
    """Start a process, and return it with its output up to the first line that matches."""
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if re.match(until, line):
            return process, output
    raise AssertionError(output)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "metrics.jsonl"
    return list(read_metrics(path)) if path.exists() else []


def values_of(folder: Path, name: str) -> list[float]:
    return [line[name] for line in lines_of(folder)]


NUM_KILLS = 10 if is_nightly() else 4
NUM_ROWS, ROWS_PER_STEP, SAMPLES = 6, 2, 2
LOGGED_TRAIN = """
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


def rows_of(step: int) -> list[list[int]]:
    first = (step - 1) * ROWS_PER_STEP
    return [[(first + row) % NUM_ROWS, sample] for row in range(ROWS_PER_STEP) for sample in range(SAMPLES)]


def test_a_training_that_is_killed_again_and_again_loses_at_most_a_step_each_time(tmp_path: Path) -> None:
    rng = random.Random(7)
    trainer = {"mode": "async", "max_staleness": 2, "total_steps": 100_000, "save_every": 1}
    change_settings(tmp_path, data={"shuffle": False}, trainer=trainer)
    rows = [{"prompt": f"question {n}", "number": n} for n in range(NUM_ROWS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "train.py").write_text(LOGGED_TRAIN)
    command = [sys.executable, "train.py", "--resume"]
    first_steps: dict[int, int] = {}
    """First step of each process."""
    for _ in range(NUM_KILLS):
        before = [line["step"] for line in lines_of(tmp_path)]
        process, output = started(command, tmp_path, until=r"step \d+/")
        time.sleep(rng.uniform(0, 1.5))
        process.kill()
        process.communicate()
        resumed_after = re.search(r"resuming after step (\d+)", output)
        first_steps[process.pid] = int(resumed_after[1]) + 1 if resumed_after else 1
        assert first_steps[process.pid] - 1 >= max(before, default=0) - 1, output

    last = max(values_of(tmp_path, "step"))
    run([*command, f"trainer.total_steps={last + 3:.0f}"], tmp_path)

    assert values_of(tmp_path, "step") == list(range(1, int(last) + 4))
    lines = [json.loads(line) for line in (tmp_path / "trained.log").read_text().splitlines()]
    for pid, first_step in first_steps.items():
        trained = [line["rows"] for line in lines if line["pid"] == pid]
        assert trained
        assert trained == [rows_of(first_step + number) for number in range(len(trained))]


KILLED_AFTER = 3
"""Continuations of the second step that have ended when the process is killed."""
THREE_TURNS = """
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
KILLED_TRAIN = f"""
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
FORKED = [sys.executable, "train.py", "train", "config.yaml"]


def make_forked(folder: Path, **trainer: Any) -> None:
    change_settings(
        folder,
        rollout={
            "n": 3,
            "response_length": 64,
            "agent": {"default_agent_loop": "three_turns", "loop_files": ["task.py"]},
            "multi_turn": {"max_turn_tokens": 3},
        },
        algorithm={"adv_estimator": "fork", "fork": {"choice": "every"}, "drop_zero_variance_groups": False},
        trainer={"total_steps": 3, "save_every": 3, **trainer},
    )
    (folder / "train.py").write_text(KILLED_TRAIN)
    (folder / "task.py").write_text(THREE_TURNS)


def test_a_run_that_is_killed_in_the_middle_of_its_forks_resumes_to_the_same_numbers(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    command = [*FORKED, "rollout.deterministic=true", "actor.lr=0.01"]
    for folder in (whole, killed):
        make_forked(folder)
    run(command, whole)
    run(command, killed, returncode=-signal.SIGKILL, KILLED="1")
    output = run([*command, "--resume"], killed).stdout
    assert "continuations are in the journal" in output
    timed = ("timing", "time/", "perf/", "agent_loop/", "storage/")
    found, expected = (
        [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines_of(folder)]
        for folder in (killed, whole)
    )
    assert found == expected
    # Each trajectory has three turns of three tokens: two states, and two continuations of each.
    assert expected[0][names.FORK_TOKENS] == 2 * 6 * (6 + 3)
    for line in expected:
        assert line[names.FORK_STATES] == 2 * 6
        assert line[names.FORK_CONTINUATIONS] == 2 * 2 * 6
        assert line[names.FORK_LOST_SHARE] == 0
        assert line[names.ROWS_TRAINED] > 0


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TWO = "trainer.num_processes=2"
ENDLESS = ["trainer.total_steps=100000", "trainer.save_every=100000"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    change_settings(
        tmp_path,
        reward={"function": "reward.py:reward"},
        rollout={"n": 4},
        actor={"ppo_mini_batches": 2},
    )
    (tmp_path / "reward.py").write_text(
        "def reward(output, row):\n    return sum(output.response_ids) % 7 / 7\n"
    )
    return tmp_path


def two_started(folder: Path) -> subprocess.Popen[str]:
    """Start two processes and return rank 0 after two steps."""
    return started([*TRAIN, TWO, *ENDLESS], folder, until="step 2/")[0]


def other_rank_of(rank_0: subprocess.Popen[str]) -> int:
    children = Path(f"/proc/{rank_0.pid}/task/{rank_0.pid}/children").read_text().split()
    [rank_1] = [
        int(pid)
        for pid in children
        if b"agent_loop.training.ranks" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return rank_1


def assert_ends(pid: int, *, within_s: float) -> None:
    give_up_at = time.monotonic() + within_s
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < give_up_at, f"process {pid} is still there"
        time.sleep(0.05)


def test_torchrun_trains_and_one_process_resumes_from_its_checkpoint(project: Path) -> None:
    run([*TORCHRUN, *TRAIN[1:]], project)
    output = run([*TRAIN, "--resume", "trainer.total_steps=4"], project).stdout
    assert "resuming after step 3" in output
    assert values_of(project, "step") == [1, 2, 3, 4]
    assert all(norm > 0 for norm in values_of(project, names.GRAD_NORM))
    # The servers sample with the trained weights.
    assert max(values_of(project, names.LOGPROB_DIFF_MAX)) < 1e-4


def test_ctrl_c_saves_and_ends_both_processes_which_listen_on_loopback_only(project: Path) -> None:
    rank_0 = two_started(project)
    rank_1 = other_rank_of(rank_0)
    addresses = listening_addresses(process_tree(rank_0.pid))
    assert addresses
    assert all(map(is_loopback, addresses)), addresses
    rank_0.send_signal(signal.SIGINT)
    output = rank_0.communicate(timeout=100)[0]
    assert rank_0.returncode == 130, output
    assert_ends(rank_1, within_s=5)
    last = len(lines_of(project))
    output = run([*TRAIN, TWO, "--resume", f"trainer.total_steps={last + 1}"], project).stdout
    assert f"resuming after step {last}" in output


def test_a_process_that_dies_ends_the_others_with_an_error_that_names_it(project: Path) -> None:
    rank_0 = two_started(project)
    os.kill(other_rank_of(rank_0), signal.SIGKILL)
    output = rank_0.communicate(timeout=60)[0]
    assert rank_0.returncode == 2, output
    error = "of the 2 processes that train together, process 1 ended with exit code -9"
    assert f"ProcessGroupError: {error}" in output
    assert "Traceback" not in output


def test_the_other_ranks_end_if_rank_0_is_killed(project: Path) -> None:
    rank_0 = two_started(project)
    rank_1 = other_rank_of(rank_0)
    rank_0.kill()
    rank_0.communicate()
    assert_ends(rank_1, within_s=5)


def test_an_error_of_all_processes_is_shown_and_ends_the_run(project: Path) -> None:
    settings = ["actor.kl_loss_coef=0.1", "model.lora_rank=2", "model.target_modules=[nothing_like_this]"]
    done = run([*TRAIN, TWO, *settings], project, returncode=2)
    assert "model.target_modules is ['nothing_like_this']" in done.stderr
    assert "Traceback" not in done.stderr


NUM_UPDATES = 8
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "grpo": {"actor": {"ppo_mini_batches": 2, "kl_loss_coef": 0.1, "max_tokens_per_micro_batch": 60}},
    "gae": {
        "algorithm": {"adv_estimator": "gae"},
        "actor": {"gradient_checkpointing": True, "old_log_probs": "recompute"},
    },
    "tree": {"actor": {"gradient_checkpointing": True, "max_tokens_per_micro_batch": 60}},
    "sources": {
        "algorithm": {
            "turn_reward_weight": 0.5,
            "by_data_source": {
                "a": {"adv_estimator": "gdpo", "reward_parts": {"reward": 1, "part": 0.5}},
                "b": {"adv_estimator": "gigpo", "anchor_state": "state"},
            },
        },
        "rollout": {"n": 6},
    },
    "lora": {"model": {"lora_rank": 4}, "actor": {"kl_loss_coef": 0.1}},
}
TOLERANCE = 1e-5


def settings(folder: Path, case: str, *, num_processes: int) -> Config:
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder), "device": "cpu"},
        "actor": {"lr": 1e-3, "warmup_steps": 3},
        "critic": {"lr": 1e-3},
        "trainer": {"num_processes": num_processes},
    }
    for section, values in CASES[case].items():
        sections[section] = sections.get(section, {}) | values
    return Config.model_validate(sections)


@dataclass(frozen=True, slots=True)
class Outcome:
    metrics: list[dict[str, float]]
    """Metrics of each update."""
    weights: dict[str, Tensor]
    checkpoint: Path
    """Checkpoint after half of the updates."""
    base_ids: list[str]
    """Base ids of the published weights, if the model has adapters."""


@cache
def batch_of(update: int) -> RolloutBatch:
    trajectories = sample_trajectories(tiny_policy(), seed=update)
    return assemble([with_fields(trajectory) for trajectory in trajectories], pad_token_id=PAD)


def with_fields(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory of a game, with a data source, a part of the reward, and feedback on its first turn."""
    segments, rollout = trajectory.output.segments, trajectory.rollout
    place = len(segments[1]) - 1
    feedback = Feedback(Origin.TOOL, place=place, reward=rollout / 5, extra={"state": rollout % 2})
    return structs.replace(
        trajectory,
        output=AgentLoopOutput(segments=segments, feedback=[feedback], extra_fields={"seat": rollout % 2}),
        row={**trajectory.row, "data_source": ["a", "b", None][trajectory.group % 3]},
        reward_extra={"part": rollout % 3},
    )


async def train(config: Config, run_dir: Path, *, resume_from: Path | None = None) -> Outcome:
    """Run the updates, each on another batch, with a checkpoint after half of them; or resume from a checkpoint."""
    middle = NUM_UPDATES // 2
    metrics: list[dict[str, float]] = []
    checkpoint = resume_from
    async with start_process_group(config) as process_group:
        learner = load_learner(
            config, checkpoint=resume_from and open_checkpoint(resume_from), process_group=process_group
        )
        for number in range(middle if resume_from else 0, NUM_UPDATES):
            if number == middle and checkpoint is None:
                checkpoint = save_checkpoint(
                    run_dir, step=number, learner=learner, tokenizer=tiny_tokenizer(), config={}, keep=1
                )
            metrics.append(learner.learn(batch_of(number)))
        next(iter(learner.weights()))  # A reader that stops early.
        published = [learner.weights() for _ in range(2)]
        weights = {name: value.clone() for name, value in published[-1]}
    assert checkpoint is not None
    base_ids = [each.base_id for each in published if isinstance(each, AdaptedWeights)]
    return Outcome(metrics, weights, checkpoint, base_ids)


def assert_same(ours: Outcome, expected: Outcome) -> None:
    for one, other in zip(reversed(ours.metrics), reversed(expected.metrics), strict=False):
        assert one == pytest.approx(other, abs=TOLERANCE, rel=TOLERANCE)
    assert ours.weights.keys() == expected.weights.keys()
    for name, value in ours.weights.items():
        torch.testing.assert_close(value, expected.weights[name], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_match_one_and_its_checkpoints(policy_folder: Path, tmp_path: Path, case: str) -> None:
    one, two = (settings(policy_folder, case, num_processes=number) for number in (1, 2))

    def run(config: Config, name: str, resume_from: Path | None = None) -> Outcome:
        return asyncio.run(train(config, tmp_path / name, resume_from=resume_from))

    alone, together = run(one, "1"), run(two, "2")
    assert len(together.metrics) == NUM_UPDATES
    assert together.metrics[-1][names.GRAD_NORM] > 0
    assert len(together.base_ids) == 2 * (case == "lora")
    assert len(set(together.base_ids)) <= 1
    assert_same(together, alone)
    assert_same(run(two, "2-again", alone.checkpoint), alone)
    assert_same(run(one, "1-again", together.checkpoint), alone)

"""Rollouts that run ahead of the weights, and groups that replace groups without variance."""

from __future__ import annotations

import asyncio
import io
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM

from agent_loop.config import Config
from agent_loop.training import metrics as names
from agent_loop.training.checkpoint import latest_checkpoint
from agent_loop.training.metrics import read_metrics
from agent_loop.training.ppo_trainer import PPOTrainer
from agent_loop.training.run import TrainResult
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row
from tests.training.fakes import FakeRollouts, tiny_policy


class SlowRollouts(FakeRollouts):
    """Rollouts that take time, and longer for later steps. Tokens are sampled with the weights at their start."""

    def __init__(self) -> None:
        super().__init__(tiny_policy())
        self.rows_of: dict[int, Sequence[Row]] = {}
        """Rows by step."""
        self.num_running = self.most_running = 0
        self.is_awake = False

    async def run(self, rows: Sequence[Row], **options: Any) -> list[Trajectory]:
        if not options.get("validate"):
            step = step_of(options["label"])
            assert step not in self.rows_of
            self.rows_of[step] = rows
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            trajectories = await super().run(rows, **options)
            await asyncio.sleep(0.05)
        finally:
            self.num_running -= 1
        return trajectories


def step_of(label: str) -> int:
    return int(label.split("/")[0].removeprefix("step="))


def with_settings(config: Config, *, run_dir: Path, **trainer: Any) -> Config:
    trainer = {"run_dir": str(run_dir), **trainer}
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=trainer)})


def train(config: Config, rollouts: FakeRollouts, **options: Any) -> TrainResult:
    options = {"console": Console(file=io.StringIO())} | options
    return asyncio.run(PPOTrainer(config, manager=rollouts, **options).fit())


def lines_of(result: TrainResult) -> list[dict[str, Any]]:
    return list(read_metrics(result.run_dir / "metrics.jsonl"))


def policy_of(result: TrainResult) -> dict[str, Tensor]:
    assert result.checkpoint is not None
    return AutoModelForCausalLM.from_pretrained(result.checkpoint / "model", dtype="float32").state_dict()


def test_max_staleness_of_zero_is_synchronous_training_bit_for_bit(config: Config, tmp_path: Path) -> None:
    sync_rollouts, async_rollouts = SlowRollouts(), SlowRollouts()

    synchronous = train(with_settings(config, run_dir=tmp_path / "sync"), sync_rollouts)
    asynchronous = train(
        with_settings(config, run_dir=tmp_path / "async", mode="async", max_staleness=0), async_rollouts
    )

    assert async_rollouts.rows_of == sync_rollouts.rows_of
    assert async_rollouts.most_running == 1
    expected = policy_of(synchronous)
    assert all(torch.equal(value, expected[name]) for name, value in policy_of(asynchronous).items())
    for one, other in zip(lines_of(synchronous), lines_of(asynchronous), strict=True):
        timings = {name for name in one if name.startswith(("timing_s/", "time/", "perf/"))}
        assert {k: v for k, v in one.items() if k not in timings} == {
            k: v for k, v in other.items() if k not in timings
        }


@pytest.mark.parametrize("max_staleness", [1, 4])
def test_every_row_is_trained_once_and_no_token_is_older_than_max_staleness(
    config: Config, tmp_path: Path, max_staleness: int
) -> None:
    rollouts, reference = SlowRollouts(), SlowRollouts()
    config = with_settings(config, run_dir=tmp_path / "run", total_steps=8)
    settings = {"mode": "async", "max_staleness": max_staleness, "val_every": 3}

    result = train(with_settings(config, run_dir=tmp_path / "run", **settings), rollouts)
    train(with_settings(config, run_dir=tmp_path / "sync"), reference)

    lines = lines_of(result)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert sorted(rollouts.rows_of) == list(range(1, 9))
    assert rollouts.rows_of == reference.rows_of
    staleness = [line[names.STALENESS_MAX] for line in lines]
    assert all(steps <= min(number, max_staleness) for number, steps in enumerate(staleness))
    assert max(staleness) == max_staleness  # Not at each step: a rollout may start late on a busy machine.
    assert all(line[names.STALENESS_MEAN] <= line[names.STALENESS_MAX] for line in lines)
    assert 1 < rollouts.most_running <= max_staleness + 2  # A validation may run at the same time.
    assert rollouts.num_running == 0


def test_ctrl_c_ends_all_rollouts_and_the_run_can_be_resumed(config: Config, tmp_path: Path) -> None:
    class Interrupted(SlowRollouts):
        async def run(self, rows: Sequence[Row], **options: Any) -> list[Trajectory]:
            if options["label"] == "step=5":
                signal.raise_signal(signal.SIGINT)
            return await super().run(rows, **options)

    settings = with_settings(config, run_dir=tmp_path / "run", mode="async", max_staleness=2, total_steps=6)
    rollouts = Interrupted()

    stopped = train(settings, rollouts)
    assert stopped.is_interrupted
    assert rollouts.num_running == 0
    assert latest_checkpoint(stopped.run_dir).step == stopped.step

    rest = SlowRollouts()
    resumed = train(settings, rest, resume="auto")

    assert sorted(rest.rows_of) == list(range(stopped.step + 1, 7))
    assert [line["step"] for line in lines_of(resumed)] == list(range(1, 7))


class SomeEqualRewards(FakeRollouts):
    """Rollouts in which all rewards of every second group are equal."""

    def __init__(self) -> None:
        super().__init__(tiny_policy())
        self.by_step: dict[int, list[Row]] = {}
        self.num_groups = 0

    async def run(self, rows: Sequence[Row], **options: Any) -> list[Trajectory]:
        self.by_step.setdefault(step_of(options["label"]), []).extend(rows)
        trajectories = await super().run(rows, **options)
        first = self.num_groups
        self.num_groups += len(rows)
        return [
            structs.replace(t, reward=1.0 if (first + t.group) % 2 else float(t.rollout % 2))
            for t in trajectories
        ]


def test_groups_without_variance_are_replaced_by_other_rows(config: Config, tmp_path: Path) -> None:
    config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"max_refills": 4})})
    rollouts = SomeEqualRewards()

    result = train(with_settings(config, run_dir=tmp_path / "run"), rollouts)

    for line in lines_of(result):
        assert line[names.DROPPED_GROUPS] >= 1
        assert line[names.SIGNAL_SHARE] == 1.0
        assert line[names.ROWS_TRAINED] == 16
    for rows in rollouts.by_step.values():
        prompts = [row["raw_prompt"][0]["content"] for row in rows]
        batch, others = prompts[:4], prompts[4:]
        assert others
        assert len(set(others) - set(batch)) == len(others)

"""Whole runs with samplers: the same weights after a resume, and replayed groups in the update."""

from __future__ import annotations

import asyncio
import io
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
from agent_loop.training.metrics import read_metrics
from agent_loop.training.ppo_trainer import PPOTrainer
from agent_loop.training.run import TrainResult
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row
from tests.training.fakes import FakeRollouts, tiny_policy


class RowRewards(FakeRollouts):
    """Rollouts in which the first rows always fail, the last rows are always solved, and the others have both."""

    def __init__(self) -> None:
        super().__init__(tiny_policy())
        self.prompts: dict[str, list[str]] = {}
        """First word of the prompts of each run, by its label."""

    async def run(self, rows: Sequence[Row], **options: Any) -> list[Trajectory]:
        prompts = [row["raw_prompt"][0]["content"].split()[0] for row in rows]
        if not options.get("validate"):
            self.prompts[options["label"]] = prompts
        trajectories = await super().run(rows, **options)
        return [structs.replace(t, reward=reward_of(int(prompts[t.group]), t.rollout)) for t in trajectories]


def reward_of(row: int, rollout: int) -> float:
    return 0.0 if row < 6 else 1.0 if row > 9 else float(rollout % 2)


def with_sampler(config: Config, *, run_dir: Path, sampler: dict[str, Any], **trainer: Any) -> Config:
    values = config.model_dump()
    values["data"]["sampler"] = sampler
    values["trainer"] |= {"run_dir": str(run_dir), **trainer}
    return Config.model_validate(values)


def train(
    config: Config, *, console: Console | None = None, **options: Any
) -> tuple[TrainResult, RowRewards]:
    rollouts = RowRewards()
    trainer = PPOTrainer(config, manager=rollouts, console=console or Console(file=io.StringIO()), **options)
    return asyncio.run(trainer.fit()), rollouts


def policy_of(result: TrainResult) -> dict[str, Tensor]:
    assert result.checkpoint is not None
    return AutoModelForCausalLM.from_pretrained(result.checkpoint / "model", dtype="float32").state_dict()


SAMPLERS: Sequence[dict[str, Any]] = (
    {"name": "curriculum", "floor": 0.1},
    {"name": "curriculum", "skip_failed": 1, "skip_solved": 1, "skip_for": 2},
    {"name": "uniform", "replay_share": 0.5, "replay_max_age": 3},
)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_resumed_run_has_the_rows_and_weights_of_a_run_that_never_stopped(
    config: Config, tmp_path: Path, sampler: dict[str, Any]
) -> None:
    whole, rollouts = train(with_sampler(config, run_dir=tmp_path / "whole", sampler=sampler, total_steps=4))
    half = with_sampler(config, run_dir=tmp_path / "half", sampler=sampler, total_steps=2, save_every=1)
    _, first = train(half)

    resumed, rest = train(
        with_sampler(config, run_dir=tmp_path / "half", sampler=sampler, total_steps=4), resume=True
    )

    assert first.prompts | rest.prompts == rollouts.prompts
    expected = policy_of(whole)
    assert all(torch.equal(value, expected[name]) for name, value in policy_of(resumed).items())
    own = {names.ROWS_SEEN, names.ROWS_SUCCESS, names.ROWS_SKIPPED_SHARE, names.REPLAYED_TOKENS}
    lines = [
        [{name: line.get(name) for name in own} for line in read_metrics(result.run_dir / "metrics.jsonl")]
        for result in (whole, resumed)
    ]
    assert lines[0] == lines[1]


def test_replayed_groups_are_trained_and_counted_and_are_no_rollouts(config: Config, tmp_path: Path) -> None:
    sampler = {"replay_share": 0.5, "replay_max_age": 2}

    result, rollouts = train(with_sampler(config, run_dir=tmp_path / "run", sampler=sampler, total_steps=8))

    lines = list(read_metrics(result.run_dir / "metrics.jsonl"))
    replayed = [int(line.get(names.REPLAYED_GROUPS, 0)) for line in lines]
    assert replayed[0] == 0
    assert sum(replayed) > 3
    for line, prompts, num_replayed in zip(lines, rollouts.prompts.values(), replayed, strict=True):
        assert len(prompts) == 4 - num_replayed
        assert line[names.REPLAYED_TOKENS if num_replayed else names.MODEL_TOKENS] == 4 * 5 * (
            num_replayed or len(prompts)
        )
        assert line.get(names.REPLAYED_AGE_MAX, 0) <= 2
        assert line[names.STALENESS_MAX] == 0
    trained = [line[names.ROWS_TRAINED] for line in lines if line.get(names.REPLAYED_GROUPS) == 2]
    assert all(num_rows >= 8 for num_rows in trained)

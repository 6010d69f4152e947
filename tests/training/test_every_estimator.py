"""Every registered estimator takes a step through the trainer."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console

from agent_loop.config import Config
from agent_loop.training import metrics as names
from agent_loop.training.metrics import read_metrics
from agent_loop.training.ppo_trainer import PPOTrainer
from agent_loop.training.registry import ESTIMATORS
from agent_loop.trajectory import Feedback, Trajectory
from agent_loop.types import Origin, Row
from tests.training.fakes import REWARDED, FakeRollouts, tiny_policy

SETTINGS: dict[str, dict[str, Any]] = {
    "fork": {},
    "gae": {},
    "gdpo": {"reward_parts": {"reward": 1, "first": 0.5}},
    "gigpo": {"gamma": 0.9, "anchor_state": "first"},
    "grpo": {},
    "reinforce_plus_plus": {},
    "reinforce_plus_plus_baseline": {},
    "remax": {},
    "rloo": {},
    "turn_grpo": {"gamma": 0.9},
}


class RewardedTurns(FakeRollouts):
    """Rollouts whose first turn has a reward of its own, a state after it, and a part in the reward."""

    async def run(self, rows: Sequence[Row], **options: Any) -> list[Trajectory]:
        on_trajectory: Callable[[Trajectory], None] = options.pop("on_trajectory", None) or (lambda t: None)
        found = [_with_turn_reward(t) for t in await super().run(rows, **options)]
        for trajectory in found:
            on_trajectory(trajectory)
        return found


def _with_turn_reward(trajectory: Trajectory) -> Trajectory:
    output = trajectory.output
    first = float(REWARDED in output.segments[1].token_ids)
    feedback = Feedback(
        Origin.TOOL, "tool", place=len(output.segments[1]) - 1, reward=first, extra={"first": first}
    )
    output = type(output)(segments=output.segments, feedback=[feedback])
    return structs.replace(trajectory, output=output, reward_extra={"first": first})


def test_the_settings_below_name_every_built_in_estimator() -> None:
    functions = ESTIMATORS._functions  # pyright: ignore[reportPrivateUsage]
    assert {name for name, f in functions.items() if f.__module__.startswith("agent_loop.")} == set(SETTINGS)


@pytest.mark.nightly(keep=5)
@pytest.mark.parametrize("estimator", sorted(SETTINGS))
def test_an_estimator_takes_a_step_through_the_trainer(config: Config, estimator: str) -> None:
    algorithm = {"adv_estimator": estimator, "turn_reward_weight": 0.5, **SETTINGS[estimator]}
    values = config.model_dump() | {"algorithm": algorithm}
    config = Config.model_validate(values | {"trainer": values["trainer"] | {"total_steps": 1}})

    result = asyncio.run(
        PPOTrainer(config, manager=RewardedTurns(tiny_policy()), console=Console(file=io.StringIO())).fit()
    )

    (line,) = read_metrics(result.run_dir / "metrics.jsonl")
    assert line[names.ROWS_TRAINED] > 0
    assert line["actor/grad_norm"] > 0
    assert line[names.ADVANTAGE_STD] > 0

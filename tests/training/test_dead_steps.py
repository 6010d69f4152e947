"""A step without a usable signal is reported with its reason, and a run of many such steps stops."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console

from agent_loop.config import Config
from agent_loop.errors import TrainingError
from agent_loop.training import metrics as names
from agent_loop.training.checkpoint import latest_checkpoint
from agent_loop.training.metrics import read_metrics
from agent_loop.training.monitor import Monitor, why_dead
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row
from tests.training.fakes import FakeRollouts, tiny_policy
from tests.training.test_ppo_trainer import changed, train

ALIVE = {
    names.SIGNAL_SHARE: 0.5,
    names.SUCCESS_SHARE: 0.5,
    names.ADVANTAGE_MEAN: 0.0,
    names.ADVANTAGE_STD: 1.0,
    names.ROWS_TRAINED: 8.0,
    names.OPTIMIZER_STEPS: 2.0,
    names.NONFINITE_UPDATES: 0.0,
}
"""Metrics of a step that had a signal."""


class RewardedRollouts(FakeRollouts):
    """Rollouts whose rewards are equal in the steps `dead`, which gives their reward by the number of the step.

    A pair of values gives the first to the first group and the second to the other groups. In the other steps, every
    second trajectory of a group is rewarded.
    """

    def __init__(self, dead: dict[int, float | tuple[float, float] | None]) -> None:
        super().__init__(tiny_policy())
        self._dead = dead

    async def run(self, rows: Sequence[Row], **options: Any) -> list[Trajectory]:
        trajectories = await super().run(rows, **options)
        step = self.weight_version + 1
        if step not in self._dead:
            return [structs.replace(t, reward=float(t.rollout % 2)) for t in trajectories]
        given = self._dead[step]
        first, other = given if isinstance(given, tuple) else (given, given)
        return [structs.replace(t, reward=other if t.group else first) for t in trajectories]


def run(config: Config, dead: dict[int, float | tuple[float, float] | None], **trainer: Any) -> str:
    """Train with rewards that are equal in some steps, and return what the console showed."""
    output = io.StringIO()
    config = changed(config, "trainer", **trainer)
    train(config, rollouts=RewardedRollouts(dead), console=Console(file=output, width=1000))
    return output.getvalue()


def sampled(rows: Sequence[Row]) -> list[Trajectory]:
    return asyncio.run(FakeRollouts(tiny_policy()).run(rows, n=4))


def dead_steps_of(config: Config) -> list[float]:
    return [line[names.DEAD_STEPS] for line in read_metrics(Path(config.trainer.run_dir) / "metrics.jsonl")]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_first_dead_step_of_a_row_of_them_is_reported_once_and_they_are_counted(
    config: Config, mode: str
) -> None:
    shown = run(config, {2: 0.0, 3: 0.0, 5: 0.0}, total_steps=5, mode=mode, max_staleness=0)

    assert [line.split(":")[0] for line in shown.splitlines() if "nothing to learn" in line] == [
        "step 2 has nothing to learn from",
        "step 5 has nothing to learn from",
    ]
    assert dead_steps_of(config) == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_too_many_dead_steps_in_a_row_save_and_stop_the_run(config: Config, mode: str) -> None:
    with pytest.raises(TrainingError) as error:
        run(
            config,
            dict.fromkeys(range(2, 9), 0.0),
            total_steps=8,
            max_dead_steps=3,
            save_every=8,
            mode=mode,
            max_staleness=0,
        )

    assert str(error.value).startswith(
        "steps 2 to 4 had nothing to learn from; step 4: all 16 rewards are 0, so no trajectory is better than another"
    )
    assert "trainer.max_dead_steps is 3" in str(error.value)
    assert latest_checkpoint(Path(config.trainer.run_dir)).step == 4


def test_groups_of_equal_rewards_are_a_dead_step_for_an_estimator_that_compares_in_groups(
    config: Config,
) -> None:
    shown = run(config, {2: (0.25, 0.5)})

    assert "step 2 has nothing to learn from: in each of the 4 groups, all rewards are equal or" in shown


@pytest.mark.parametrize(
    ("changed_metrics", "reason"),
    [
        (
            {names.ROWS_TRAINED: 0.0},
            "no trajectory with a signal may be trained (16 answered); change algorithm",
        ),
        ({names.MASKED_SHARE: 1.0}, "actor.correction masks every token"),
        (
            {names.OPTIMIZER_STEPS: 0.0, names.NONFINITE_UPDATES: 2.0},
            "no gradient was finite; lower actor.lr",
        ),
    ],
)
def test_a_step_that_no_update_can_use_is_dead(changed_metrics: dict[str, float], reason: str) -> None:
    trajectories = sampled([{"raw_prompt": [{"role": "user", "content": "2 3"}]}] * 4)

    assert why_dead(trajectories, ALIVE) is None
    assert (why_dead(trajectories, ALIVE | changed_metrics) or "").startswith(reason)


def test_a_step_of_the_critic_alone_is_not_dead() -> None:
    trajectories = sampled([{"raw_prompt": [{"role": "user", "content": "2 3"}]}])
    without_actor = {key: value for key, value in ALIVE.items() if not key.startswith(names.ACTOR)}

    assert Monitor(max_dead_steps=1, report=print).add(trajectories, without_actor, step=1) == 0

"""The beginning of a known collapse is reported in one line, and again only after the run has recovered."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from rich.console import Console

from agent_loop.config import Config
from agent_loop.training import metrics as names
from agent_loop.training.monitor import CUT_SHARE, FIRST_STEPS, Monitor
from agent_loop.trajectory import AgentLoopOutput, Trajectory
from agent_loop.types import Row, StopReason
from tests.training.fakes import FakeRollouts, tiny_policy
from tests.training.test_ppo_trainer import changed, train

HEALTHY = {
    names.ENTROPY: 0.5,
    names.RESPONSE_LENGTH_MEAN: 100.0,
    names.SIGNAL_SHARE: 0.5,
    names.LOGPROB_DIFF_MEAN: 0.01,
    names.NONFINITE_UPDATES: 0.0,
    names.CRITIC_NONFINITE_UPDATES: 0.0,
}


def warnings_of(values: Sequence[float | None], *, metric: str) -> list[str]:
    """Return the warnings of a run whose other metrics are healthy. None is a step without the metric."""
    shown: list[str] = []
    watch = Monitor(max_dead_steps=None, report=shown.append)
    for step, value in enumerate(values, start=1):
        metrics = {**HEALTHY, metric: value}
        watch.check({name: each for name, each in metrics.items() if each is not None}, step=step)
    return shown


CASES: list[tuple[str, list[float], list[float], str]] = [
    (names.ENTROPY, [0.5] * 5, [0.04] * 3, "the entropy fell from 0.5 nats in the first 5 steps to 0.04: "),
    (
        names.RESPONSE_LENGTH_MEAN,
        [100] * 5,
        [210] * 3,
        "responses grew from 100 tokens in the first 5 steps to 210: ",
    ),
    (CUT_SHARE, [0.2] * 5, [0.6] * 3, "60% of the rollouts end at rollout.response_length: "),
    (
        names.SIGNAL_SHARE,
        [0.5] * 5,
        [0.02, 0.0, 0.04],
        "only 2.0% of the rollouts of the last 3 steps had a signal: ",
    ),
    (
        names.LOGPROB_DIFF_MEAN,
        [0.01] * 5,
        [0.2] * 3,
        "the log-probs of trainer and rollout differ by 0.2 nats in the ",
    ),
]


@pytest.mark.parametrize(("metric", "good", "bad", "seen"), CASES)
def test_a_collapse_is_reported_once_until_it_has_recovered(
    metric: str, good: list[float], bad: list[float], seen: str
) -> None:
    once = warnings_of([*good, *bad, *bad, *bad], metric=metric)
    twice = warnings_of([*good, *bad, *good, *bad], metric=metric)

    assert len(once) == 1
    assert len(twice) == 2
    assert warnings_of(good * 5, metric=metric) == []


def test_one_unusual_step_gives_no_warning() -> None:
    assert warnings_of([0.5] * 6 + [0.001] + [0.5] * 3, metric=names.ENTROPY) == []
    assert warnings_of([0.5] * 6 + [0.01, 0.01] + [0.5] * 3, metric=names.SIGNAL_SHARE) == []


def test_values_are_compared_with_the_first_steps_only_when_these_are_complete() -> None:
    values = [100.0] * (FIRST_STEPS - 1) + [1000.0] * 9

    assert warnings_of([*values[: FIRST_STEPS - 1], 300.0], metric=names.RESPONSE_LENGTH_MEAN) == []
    [line] = warnings_of(values, metric=names.RESPONSE_LENGTH_MEAN)
    assert line.startswith("step 6: responses grew from 280 tokens in the first 5 steps to 700")


@pytest.mark.parametrize(
    ("metric", "model", "setting"),
    [
        (names.NONFINITE_UPDATES, "policy", "actor.lr"),
        (names.CRITIC_NONFINITE_UPDATES, "critic", "critic.lr"),
    ],
)
def test_skipped_optimiser_steps_are_reported_at_once(metric: str, model: str, setting: str) -> None:
    shown = warnings_of([0, 2, 1, 1, 0, 0, 0, 1], metric=metric)

    assert [line.split(" were")[0] for line in shown] == [
        f"step 2: 2 optimiser steps of the {model}",
        f"step 8: 1 optimiser steps of the {model}",
    ]
    assert f"lower {setting}" in shown[0]


class CutRollouts(FakeRollouts):
    """Rollouts that end at the response length, and whose servers return other log-probs than the trainer's."""

    async def run(self, rows: Sequence[Row], **options: Any) -> list[Trajectory]:
        trajectories = await super().run(rows, **options)
        return [structs.replace(t, output=self._cut(t.output)) for t in trajectories]

    def _cut(self, output: AgentLoopOutput) -> AgentLoopOutput:
        segments = [
            s if s.logprobs is None else structs.replace(s, logprobs=s.logprobs - np.float32(0.5))
            for s in output.segments
        ]
        return AgentLoopOutput(segments=segments, stop_reason=StopReason.RESPONSE_LENGTH)


def test_a_run_shows_its_warnings_on_the_console(config: Config) -> None:
    output = io.StringIO()

    train(
        changed(config, "trainer", total_steps=3),
        rollouts=CutRollouts(tiny_policy()),
        console=Console(file=output, width=1000),
    )

    shown = [line for line in output.getvalue().splitlines() if line.startswith("step 1: ")]
    assert [line.split(":")[1] for line in shown] == [
        " 100% of the rollouts end at rollout.response_length",
        " the log-probs of trainer and rollout differ by 0.5 nats in the mean",
    ]
    assert output.getvalue().count("end at rollout.response_length") == 1

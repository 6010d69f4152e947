"""The beginning of a known collapse is reported in one line, and again only after the run has recovered."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from agent_loop.training import metrics as names
from agent_loop.training.monitor import CUT_SHARE, Monitor

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

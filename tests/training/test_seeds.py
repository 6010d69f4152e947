"""Comparisons of groups of runs equal hand-worked values and independent computations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from agent_loop.errors import DataError
from agent_loop.training.evaluation.estimates import MeanEstimate, estimate_welch, student_quantile
from agent_loop.training.evaluation.runs import (
    MetricComparison,
    RunGroup,
    TrainingRun,
    compare_metric,
)

TABLE = {
    1: 12.7062047,
    2: 4.3026527,
    3: 3.1824463,
    4: 2.7764451,
    5: 2.5705818,
    10: 2.2281389,
    20: 2.0859634,
    30: 2.0422725,
    60: 2.0002978,
    120: 1.9799304,
}
"""Quantiles of 0.975 of Student's t by degrees of freedom, as tables of statistics print them."""


def group(source: str, runs: Mapping[int, Sequence[float]]) -> RunGroup:
    """Return a group with the rewards of each seed from step 1 on."""
    return RunGroup(
        source,
        tuple(
            TrainingRun(f"{source}-{seed}", seed, {"reward": dict(enumerate(rewards, start=1))})
            for seed, rewards in runs.items()
        ),
    )


def compare(*groups: RunGroup, last: int = 10) -> MetricComparison:
    return compare_metric(groups, metric="reward", num_recent=last)


def share_within(limit: float, *, df: float) -> float:
    """Return the probability that Student's t is within the limit, by the trapezoidal rule on its density."""
    t = np.linspace(-limit, limit, 400_001)
    constant = math.gamma((df + 1) / 2) / (math.sqrt(df * math.pi) * math.gamma(df / 2))
    density = constant * (1 + t**2 / df) ** (-(df + 1) / 2)
    return float(np.sum(density[1:] + density[:-1])) / 2 * (t[1] - t[0])


@pytest.mark.parametrize(("df", "expected"), list(TABLE.items()))
def test_quantiles_are_those_of_the_tables(df: int, expected: float) -> None:
    assert student_quantile(df) == pytest.approx(expected, abs=1e-6)


def test_welch_equals_the_calculation_by_hand() -> None:
    # variances 1 and 20/3, squared errors 1/3 and 5/3, df = 2^2 / ((1/3)^2 / 2 + (5/3)^2 / 3) = 216 / 53
    estimate = estimate_welch([2.0, 4.0, 6.0, 8.0], others=[1.0, 2.0, 3.0])
    assert estimate.value == pytest.approx(3.0)
    assert estimate.half_width is not None
    assert share_within(estimate.half_width / math.sqrt(2), df=216 / 53) == pytest.approx(0.95, abs=1e-8)


def test_a_group_has_the_mean_over_its_runs_with_students_interval() -> None:
    found = compare(group("a", {0: [0.0, 1.0], 1: [0.0, 2.0], 2: [0.0, 3.0]}))
    half = TABLE[2] / math.sqrt(3)
    assert found.last.groups[0].value == 2.0
    assert found.last.groups[0].half_width == pytest.approx(half)
    # the means of both steps are half of the last values
    assert (found.num_recent, found.recent.groups[0].value) == (2, 1.0)
    assert found.recent.groups[0].half_width == pytest.approx(half / 2)
    assert found.last.differences == ()


def test_runs_with_the_same_seeds_are_paired_in_any_order() -> None:
    found = compare(group("a", {0: [1.0], 1: [5.0], 2: [9.0]}), group("b", {2: [12.0], 0: [2.0], 1: [7.0]}))
    difference = found.last.differences[0]
    # differences of the seeds: 1, 2 and 3
    assert difference.value == pytest.approx(2.0)
    assert difference.half_width == pytest.approx(TABLE[2] / math.sqrt(3))


@pytest.mark.parametrize("seeds", [(0, 1, 3), (0, 1)])
def test_runs_with_other_seeds_are_compared_by_welch(seeds: tuple[int, ...]) -> None:
    first = group("a", {0: [1.0], 1: [5.0], 2: [9.0]})
    second = group("b", {seed: [2.0 * seed] for seed in seeds})
    difference = compare(first, second).last.differences[0]
    assert difference == estimate_welch([2.0 * seed for seed in seeds], others=[1.0, 5.0, 9.0])


def test_one_run_has_values_and_no_intervals() -> None:
    found = compare(group("a", {0: [1.0, 2.0]}), group("b", {0: [1.0, 3.0]}))
    assert found.last.groups == (MeanEstimate(2.0, None, None), MeanEstimate(3.0, None, None))
    assert found.last.differences[0] == MeanEstimate(1.0, None, None)


def test_only_steps_of_all_runs_are_compared() -> None:
    short, long = group("a", {0: [1.0, 2.0]}), group("b", {0: [1.0, 3.0, 9.0], 1: [1.0, 5.0, 9.0]})
    found = compare(short, long, last=1)
    assert [point.step for point in found.curve] == [1, 2]
    assert (found.num_steps_left_out, found.incomplete_runs) == (1, ("a-0",))
    assert found.last.groups[1].value == found.recent.groups[1].value == 4.0


def test_runs_without_a_common_step_are_refused() -> None:
    later = RunGroup("b", (TrainingRun("b-0", 0, {"reward": {5: 1.0, 6: 1.0}}),))
    with pytest.raises(DataError, match=r"'a-0': 1 to 2, 'b-0': 5 to 6"):
        compare(group("a", {0: [1.0, 2.0]}), later)

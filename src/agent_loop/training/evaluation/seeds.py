"""Comparison of groups of training runs: means over seeds with confidence intervals, and differences of groups.

A run is one observation. The values of a run at its steps are correlated, so only runs count as independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agent_loop.errors import DataError
from agent_loop.training.evaluation.estimates import MeanEstimate, estimate_mean, estimate_welch
from agent_loop.training.evaluation.run_groups import RunGroup, TrainingRun


@dataclass(frozen=True, slots=True)
class GroupDifference:
    """How much larger the mean of a group is than that of the first group."""

    estimate: MeanEstimate
    is_paired: bool
    """Whether the runs were paired by their seeds."""


@dataclass(frozen=True, slots=True)
class SeedEstimates:
    """Mean over the runs of each group, and the differences of the later groups from the first."""

    groups: tuple[MeanEstimate, ...]
    differences: tuple[GroupDifference, ...]


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Mean over the runs of each group at one step."""

    step: int
    groups: tuple[MeanEstimate, ...]


@dataclass(frozen=True, slots=True)
class Separation:
    """Steps at which the interval of a group does not overlap that of the first group."""

    first_step: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class MetricComparison:
    """Comparison of groups by one metric, at the steps at which all runs have a value."""

    metric: str
    num_steps_left_out: int
    """Number of steps at which some runs have a value and others do not."""
    incomplete_runs: tuple[str, ...]
    """Paths of the runs that have no value at some of the steps left out."""
    num_recent: int
    """Number of last steps of the mean in `recent`."""
    last: SeedEstimates
    """Value at the last step."""
    recent: SeedEstimates
    """Mean over the last steps."""
    curve: tuple[CurvePoint, ...]
    """All steps, in ascending order."""
    separations: tuple[Separation | None, ...]
    """For each group after the first; None if the intervals overlap or are unknown at every step."""

    def thin_curve(self, num_points: int) -> list[CurvePoint]:
        """Return at most `num_points` (at least 2) evenly spaced points of the curve, with the first and the last."""
        places = np.linspace(0, len(self.curve) - 1, min(num_points, len(self.curve)))
        return [self.curve[index] for index in np.round(places).astype(int).tolist()]


def compare_metric(groups: Sequence[RunGroup], *, metric: str, num_recent: int) -> MetricComparison:
    """Compare groups by a metric that all runs have.

    Args:
        groups: Groups of at least one run. Each later group is compared with the first.
        metric: Name of the metric.
        num_recent: Number of last steps for the mean of recent values; all steps if there are fewer.

    Raises:
        DataError: There is no step at which all runs have a value.
    """
    runs = [run for group in groups for run in group.runs]
    curves = [run.curves[metric] for run in runs]
    steps = [step for step in curves[0] if all(step in curve for curve in curves)]
    if not steps:
        raise DataError(
            f"there is no step at which all runs have a value of {metric!r} ({_ranges(runs, metric)}); leave out "
            "the runs with other steps"
        )
    recent = steps[-num_recent:]
    all_steps = {step for curve in curves for step in curve}
    points = tuple(CurvePoint(step, _means(_values(groups, metric, [step]))) for step in steps)
    return MetricComparison(
        metric=metric,
        num_steps_left_out=len(all_steps) - len(steps),
        incomplete_runs=tuple(run.path for run in runs if len(run.curves[metric]) < len(all_steps)),
        num_recent=len(recent),
        last=_estimate(groups, _values(groups, metric, steps[-1:])),
        recent=_estimate(groups, _values(groups, metric, recent)),
        curve=points,
        separations=tuple(_separation(points, group=index) for index in range(1, len(groups))),
    )


def are_paired(first: RunGroup, second: RunGroup) -> bool:
    """Return whether the runs of two groups have the same seeds, each once per group."""
    return (
        None not in first.seeds
        and len(set(first.seeds)) == len(first.seeds) == len(second.seeds)
        and set(first.seeds) == set(second.seeds)
    )


def _values(groups: Sequence[RunGroup], metric: str, steps: Sequence[int]) -> list[list[float]]:
    """Return the mean over the steps of each run of each group."""
    return [
        [float(np.mean([run.curves[metric][step] for step in steps])) for run in group.runs]
        for group in groups
    ]


def _estimate(groups: Sequence[RunGroup], values: Sequence[Sequence[float]]) -> SeedEstimates:
    differences = tuple(
        _difference(groups[0], group, first_values=values[0], values=found)
        for group, found in zip(groups[1:], values[1:], strict=True)
    )
    return SeedEstimates(_means(values), differences)


def _difference(
    first: RunGroup, group: RunGroup, *, first_values: Sequence[float], values: Sequence[float]
) -> GroupDifference:
    if not are_paired(first, group):
        return GroupDifference(estimate_welch(values, others=first_values), is_paired=False)
    by_seed = dict(zip(first.seeds, first_values, strict=True))
    differences = [value - by_seed[seed] for seed, value in zip(group.seeds, values, strict=True)]
    return GroupDifference(estimate_mean(differences), is_paired=True)


def _means(values: Sequence[Sequence[float]]) -> tuple[MeanEstimate, ...]:
    return tuple(map(estimate_mean, values))


def _separation(curve: Sequence[CurvePoint], *, group: int) -> Separation | None:
    steps = [point.step for point in curve if _are_apart(point.groups[0], point.groups[group])]
    return Separation(steps[0], len(steps)) if steps else None


def _are_apart(one: MeanEstimate, other: MeanEstimate) -> bool:
    """Return whether two intervals have no common value. False if one of them is unknown."""
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return False
    return one.high < other.low or other.high < one.low


def _ranges(runs: Sequence[TrainingRun], metric: str) -> str:
    steps = [(run.path, list(run.curves[metric])) for run in runs]
    return ", ".join(f"{path!r}: {min(found)} to {max(found)}" for path, found in steps)

"""Groups of training runs that differ in their seeds, read from their folders, and their comparison.

A run is one observation. The values of a run at its steps are correlated, so only runs count as independent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import glob, has_magic
from pathlib import Path
from typing import Any

import numpy as np

from agent_loop.errors import DataError, did_you_mean
from agent_loop.files.file_kinds import RUN, explain, kind_of, only_run
from agent_loop.files.plain_values import read_yaml
from agent_loop.runtime.numeric import as_finite_number
from agent_loop.storage.metrics_file import CONFIG_FILE, METRICS_FILE, read_metrics
from agent_loop.training.evaluation.estimates import MeanEstimate, estimate_mean, estimate_welch
from agent_loop.training.metrics import (
    REWARD_MEAN,
    SFT_LOSS,
    SFT_VALIDATION_LOSS,
    STEP,
    SUCCESS_SHARE,
    VALIDATION,
)

WANTED = "the folder of a training run, a folder of such runs, or a glob of them"
DEFAULT_METRICS = (
    REWARD_MEAN,
    SUCCESS_SHARE,
    f"{VALIDATION}{REWARD_MEAN}",
    SFT_LOSS,
    SFT_VALIDATION_LOSS,
    f"{VALIDATION}pass@[0-9]",
    f"{VALIDATION}pass@[0-9][0-9]",
    f"{VALIDATION}pass@[0-9][0-9][0-9]",
)
"""Metrics that are compared if none are named, as globs."""


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """Metrics of one training run."""

    path: str
    seed: int | None
    """`trainer.seed`; None if the folder has no configuration."""
    curves: Mapping[str, Mapping[int, float]]
    """By metric: the finite values by step, in ascending order of steps."""


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Runs with the same settings and different seeds."""

    source: str
    """Glob, folder or list that names the runs."""
    runs: tuple[TrainingRun, ...]

    @property
    def seeds(self) -> tuple[int | None, ...]:
        return tuple(run.seed for run in self.runs)


@dataclass(frozen=True, slots=True)
class SeedEstimates:
    """Mean over the runs of each group, and how much larger those of the later groups are than that of the first."""

    groups: tuple[MeanEstimate, ...]
    differences: tuple[MeanEstimate, ...]


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Mean over the runs of each group at one step."""

    step: int
    groups: tuple[MeanEstimate, ...]


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

    def thin_curve(self, num_points: int) -> list[CurvePoint]:
        """Return at most `num_points` (at least 2) evenly spaced points of the curve, with the first and the last."""
        places = np.linspace(0, len(self.curve) - 1, min(num_points, len(self.curve)))
        return [self.curve[index] for index in np.round(places).astype(int).tolist()]


def read_groups(sources: Sequence[str]) -> list[RunGroup]:
    """Return one group per source: a glob, the folder of a run, a folder of runs, or several, separated by commas."""
    paths = {number: _find_runs(source) for number, source in enumerate(sources)}
    owners: dict[Path, int] = {}
    for number, found in paths.items():
        for path in map(Path.resolve, found):
            if owners.setdefault(path, number) != number:
                raise DataError(
                    f"{str(path)!r} is in the group {sources[owners[path]]!r} and in {sources[number]!r}; give groups "
                    "without common runs"
                )
    return [RunGroup(sources[number], tuple(map(read_run, found))) for number, found in paths.items()]


def read_run(path: Path) -> TrainingRun:
    """Return the metrics and the seed of the run in a folder. Values that are null or not finite are left out."""
    if kind_of(path) is not RUN:
        raise DataError(explain(path, wanted=WANTED))
    file = path / METRICS_FILE
    if not file.is_file():
        raise DataError(
            f"{str(path)!r} has no {METRICS_FILE}, so no step of it ended; leave it out, or resume the run"
        )
    curves: dict[str, dict[int, float]] = {}
    for line in read_metrics(file):
        step = int(line.pop(STEP))
        for name, value in line.items():
            finite = as_finite_number(value)
            if finite is not None:
                curves.setdefault(name, {})[step] = finite
    ordered = {name: dict(sorted(curve.items())) for name, curve in curves.items()}
    return TrainingRun(str(path), _seed_of(path / CONFIG_FILE), ordered)


def choose_metrics(groups: Sequence[RunGroup], *, patterns: Sequence[str] = ()) -> list[str]:
    """Return the metrics to compare that all runs have, by names or globs such as `val/*`.

    Without patterns, these are the rewards, the share of successes and the scores of the validation.
    """
    runs = [run for group in groups for run in group.runs]
    common = sorted(name for name in runs[0].curves if all(name in run.curves for run in runs))
    chosen: dict[str, None] = {}
    for pattern in patterns or DEFAULT_METRICS:
        matches = [name for name in common if name == pattern or fnmatchcase(name, pattern)]
        if patterns and not matches:
            lacking = ", ".join(repr(run.path) for run in runs if pattern not in run.curves)
            raise DataError(
                f"no value of the metric {pattern!r} is in {lacking}; leave these runs out, or give another "
                f"--metric{did_you_mean(pattern, common)}"
            )
        chosen |= dict.fromkeys(matches)
    if not chosen:
        paths = ", ".join(repr(run.path) for run in runs)
        raise DataError(
            f"none of the metrics {', '.join(DEFAULT_METRICS[:5])} is in all of {paths}; give one with "
            f"--metric{did_you_mean('', common)}"
        )
    return list(chosen)


def compare_metric(groups: Sequence[RunGroup], *, metric: str, num_recent: int) -> MetricComparison:
    """Compare each later group with the first by a metric that all runs have.

    `num_recent` is the number of last steps for the mean of recent values.
    """
    runs = [run for group in groups for run in group.runs]
    curves = [run.curves[metric] for run in runs]
    steps = [step for step in curves[0] if all(step in curve for curve in curves)]
    if not steps:
        ranges = ", ".join(
            f"{run.path!r}: {min(curve)} to {max(curve)}" for run, curve in zip(runs, curves, strict=True)
        )
        raise DataError(
            f"there is no step at which all runs have a value of {metric!r} ({ranges}); leave out the runs with other "
            "steps"
        )

    def values(steps: Sequence[int]) -> list[list[float]]:
        return [
            [float(np.mean([run.curves[metric][step] for step in steps])) for run in group.runs]
            for group in groups
        ]

    recent = steps[-num_recent:]
    all_steps = {step for curve in curves for step in curve}
    points = tuple(CurvePoint(step, tuple(map(estimate_mean, values([step])))) for step in steps)
    return MetricComparison(
        metric=metric,
        num_steps_left_out=len(all_steps) - len(steps),
        incomplete_runs=tuple(run.path for run in runs if len(run.curves[metric]) < len(all_steps)),
        num_recent=len(recent),
        last=_estimate(groups, values(steps[-1:])),
        recent=_estimate(groups, values(recent)),
        curve=points,
    )


def are_paired(first: RunGroup, second: RunGroup) -> bool:
    """Return whether the runs of two groups have the same seeds, each once per group."""
    return (
        None not in first.seeds
        and len(set(first.seeds)) == len(first.seeds) == len(second.seeds)
        and set(first.seeds) == set(second.seeds)
    )


def _find_runs(source: str) -> list[Path]:
    """Return the folders of the runs that a source names, each once."""
    parts = [source] if Path(source).exists() else [part.strip() for part in source.split(",")]
    found: dict[Path, Path] = {}
    for part in filter(None, parts):
        paths = [Path(part)]
        if not paths[0].exists() and has_magic(part):
            paths = [Path(path) for path in sorted(glob(part, recursive=True))]
            if not paths:
                raise DataError(f"no path matches {part!r}; give {WANTED}")
        for run in (run for path in paths for run in _runs_at(path)):
            found.setdefault(run.resolve(), run)
    if not found:
        raise DataError(f"the group {source!r} names no run; give {WANTED}")
    return list(found.values())


def _runs_at(path: Path) -> list[Path]:
    """Return the run at a path, or the runs in that folder, such as `runs/a-1/train` in `runs/a-1` and in `runs`."""
    path = only_run(path)
    if not path.is_dir() or kind_of(path) is not None:
        return [path]
    inner = (only_run(folder) for folder in sorted(path.iterdir()) if folder.is_dir())
    return [folder for folder in inner if kind_of(folder) is RUN] or [path]


def _seed_of(file: Path) -> int | None:
    """Return `trainer.seed` of a configuration; None if the file does not exist or does not set it."""
    if not file.is_file():
        return None
    config: Any = read_yaml(file, what="settings")
    return config.get("trainer", {}).get("seed")


def _estimate(groups: Sequence[RunGroup], values: Sequence[Sequence[float]]) -> SeedEstimates:
    differences = tuple(
        _difference(groups[0], group, first_values=values[0], values=found)
        for group, found in zip(groups[1:], values[1:], strict=True)
    )
    return SeedEstimates(tuple(map(estimate_mean, values)), differences)


def _difference(
    first: RunGroup, group: RunGroup, *, first_values: Sequence[float], values: Sequence[float]
) -> MeanEstimate:
    if not are_paired(first, group):
        return estimate_welch(values, others=first_values)
    by_seed = dict(zip(first.seeds, first_values, strict=True))
    return estimate_mean([value - by_seed[seed] for seed, value in zip(group.seeds, values, strict=True)])

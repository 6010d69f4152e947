"""Curves of metrics of several runs, with bands over the runs of a group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from agent_loop.errors import DataError
from agent_loop.training.evaluation.runs import RunGroup, TrainingRun, compare_metric
from agent_loop.viewer.collection import RunCollection, estimate_values, groups_of

NUM_RECENT = 10
"""Number of last steps of the mean in the table."""


def metric_names(collection: RunCollection) -> list[str]:
    """Return the names of the metrics of all runs."""
    return sorted({name for record in collection.records().values() for name in record.curves()})


def seed_curves(collection: RunCollection, names: Sequence[str]) -> dict[str, Any]:
    """Return for each metric the curve of each run, and of each group the mean and its band."""
    records = collection.records()
    groups = groups_of(records)
    runs = {key: record.training_run() for key, record in records.items() if key in groups}
    return {name: _curves_of(name, runs, groups) for name in names}


def _curves_of(name: str, runs: Mapping[str, TrainingRun], groups: Mapping[str, str]) -> dict[str, Any]:
    having = {key: run for key, run in runs.items() if name in run.curves}
    members: defaultdict[str, list[TrainingRun]] = defaultdict(list)
    for key, run in having.items():
        members[groups[key]].append(run)
    return {
        "runs": {
            key: [list(run.curves[name]), list(run.curves[name].values())] for key, run in having.items()
        },
        "groups": {group: _band(name, RunGroup(group, tuple(found))) for group, found in members.items()},
    }


def _band(name: str, group: RunGroup) -> dict[str, Any] | None:
    """Return the mean of a group with its range and interval at the steps of all its runs; None if there are none."""
    try:
        comparison = compare_metric([group], metric=name, num_recent=NUM_RECENT)
    except DataError:  # no step at which all runs have a value
        return None
    steps = [point.step for point in comparison.curve]
    values = [[run.curves[name][step] for run in group.runs] for step in steps]
    means = [point.groups[0] for point in comparison.curve]
    return {
        "num_runs": len(group.runs),
        "steps": steps,
        "mean": [mean.value for mean in means],
        "min": [min(found) for found in values],
        "max": [max(found) for found in values],
        "low": [mean.value if mean.low is None else mean.low for mean in means],
        "high": [mean.value if mean.high is None else mean.high for mean in means],
        "last": estimate_values(comparison.last.groups[0]),
        "recent": estimate_values(comparison.recent.groups[0]),
        "num_recent": comparison.num_recent,
    }

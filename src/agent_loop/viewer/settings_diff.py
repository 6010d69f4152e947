"""Differences of the settings of several runs, and groups of runs that differ in their seeds alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

PLACES = frozenset({"trainer.run_dir", "trainer.experiment_name"})
"""Settings that name a run and do not change it."""
ABSENT = "-"
"""Shown for a setting that a run lacks."""


def differing_settings(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the settings that are not equal in all runs: by setting, the value in each run as text.

    Args:
        runs: Settings by dotted name, by run. Runs without settings are left out.
    """
    texts = {run: _texts(settings) for run, settings in runs.items() if settings}
    names = sorted({name for settings in texts.values() for name in settings})
    by_name = {name: {run: found.get(name, ABSENT) for run, found in texts.items()} for name in names}
    return {name: values for name, values in by_name.items() if len(set(values.values())) > 1}


def changed_settings(differing: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Return for each run the settings, seeds excepted, that differ from the most common value of all runs."""
    changed: dict[str, dict[str, str]] = {}
    for name, values in differing.items():
        (usual, _), *_ = Counter(values.values()).most_common(1)
        for run, value in values.items():
            if value != usual and not is_seed(name):
                changed.setdefault(run, {})[name] = value
    return changed


def seed_groups(runs: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return groups of runs whose settings differ in their seeds alone. A run without settings is a group."""
    groups: dict[str, list[str]] = {}
    for run, settings in runs.items():
        others = {name: text for name, text in _texts(settings).items() if not is_seed(name)}
        groups.setdefault(json.dumps(others, sort_keys=True) if others else f"alone: {run}", []).append(run)
    return list(groups.values())


def seed_of(settings: Mapping[str, Any]) -> Any:
    return settings.get("trainer.seed")


def is_seed(name: str) -> bool:
    return name.rpartition(".")[2] == "seed"


def _texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the values as text, without those that name the run. Paths in the run's folder are made equal."""
    run_dir = settings.get("trainer.run_dir")
    texts: dict[str, str] = {}
    for name, value in settings.items():
        if name in PLACES:
            continue
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        texts[name] = text.replace(run_dir, "{run_dir}") if isinstance(run_dir, str) and run_dir else text
    return texts

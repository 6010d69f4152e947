"""Runs and evaluations that are shown together."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from agent_loop.errors import DataError
from agent_loop.training.evaluation.estimates import MeanEstimate
from agent_loop.training.metrics import REWARD_MEAN, STEP
from agent_loop.viewer.find_runs import find_runs
from agent_loop.viewer.run_record import HELD_OUT, RunRecord
from agent_loop.viewer.settings_diff import changed_settings, differing_settings, seed_groups, seed_of
from agent_loop.viewer.source import RunSource


class RunCollection:
    """Runs and evaluations at some paths and below them. Runs that appear later are found too.

    Nothing is read of a run before a page needs it. Methods are thread-safe.

    Args:
        paths: Folders of runs, runs, or files of trajectories.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = [path.resolve() for path in paths]
        self._lock = threading.Lock()
        self._names: dict[Path, str] = {}
        self._sources: dict[str, RunSource] = {}
        self._records: dict[str, RunRecord] = {}

    def folders(self) -> dict[str, Path]:
        """Return the folders of the runs that exist now, by key. A key is part of the addresses of a run."""
        with self._lock:
            found = find_runs(self._paths)
            for path in found:
                if path not in self._names:
                    self._names[path] = _unused(_name_of(path, self._paths), {*self._names.values()})
            return {self._names[path].replace("/", "~"): path for path in found}

    def source(self, key: str) -> RunSource:
        """Return the data of a run.

        Raises:
            DataError: There is no such run, or it has no data.
        """
        if key not in self._sources:
            path = self.folders().get(key)
            if path is None:
                raise DataError(f"there is no run {key!r}; it may have been removed")
            self._sources[key] = RunSource(path)
        return self._sources[key]

    def record(self, key: str, path: Path) -> RunRecord:
        """Return the settings and metrics of a run."""
        return self._records.setdefault(key, RunRecord(path))

    def records(self) -> dict[str, RunRecord]:
        """Return the settings and metrics of all runs that exist now."""
        return {key: self.record(key, path) for key, path in self.folders().items()}

    def runs(self) -> dict[str, Any]:
        """Return one entry per run, and the settings that differ between them."""
        records = self.records()
        settings = {key: record.settings() for key, record in records.items()}
        differing = differing_settings(settings)
        changed = changed_settings(differing)
        groups = groups_of(records)
        return {
            "name": ", ".join(path.name for path in self._paths),
            "path": ", ".join(map(str, self._paths)),
            "now": time.time(),
            "differing": differing,
            "runs": [
                _entry(key, record)
                | {"name": key.replace("~", "/"), "group": groups.get(key), "changed": changed.get(key, {})}
                for key, record in records.items()
            ],
        }


def groups_of(records: Mapping[str, RunRecord]) -> dict[str, str]:
    """Return the name of the group of each training run: A, B, ..., Z, A2, B2, ...

    The runs of a group differ in their seeds alone. Evaluations are in no group.
    """
    settings = {key: record.settings() for key, record in records.items() if record.latest()}
    names: dict[str, str] = {}
    for number, runs in enumerate(seed_groups(settings)):
        again, letter = divmod(number, len(ascii_uppercase))
        names |= dict.fromkeys(runs, ascii_uppercase[letter] + (str(again + 1) if again else ""))
    return names


def estimate_values(estimate: MeanEstimate | None) -> list[float | None] | None:
    """Return the mean and its interval for the page."""
    return None if estimate is None else [estimate.value, estimate.low, estimate.high]


def _entry(key: str, record: RunRecord) -> dict[str, Any]:
    settings: Mapping[str, Any] = record.settings()
    latest = record.latest()
    summary = None if latest else record.summary()
    scores = summary and summary.evaluation.scores
    reward = scores and scores.mean_reward
    is_unfinished = record.is_unfinished_evaluation
    return {
        "key": key,
        "kind": "evaluation" if summary or is_unfinished else "run",
        "has_pages": not is_unfinished,
        "model": settings.get("model.path") or (summary and summary.model),
        "seed": seed_of(settings),
        "step": latest.get(STEP),
        "total_steps": settings.get("trainer.total_steps"),
        "reward": latest.get(REWARD_MEAN),
        "held_out": latest.get(HELD_OUT, reward and reward.value),
        "is_finished": summary is not None,
        "changed_at": record.changed_at(),
    }


def _name_of(path: Path, roots: Sequence[Path]) -> str:
    """Return the path of a run below the folder that all given paths share."""
    shared = Path(os.path.commonpath([root if root != path else root.parent for root in roots]))
    return path.relative_to(shared).as_posix() if path.is_relative_to(shared) else path.name


def _unused(name: str, used: set[str]) -> str:
    number, candidate = 2, name
    while candidate in used:
        candidate, number = f"{name}-{number}", number + 1
    return candidate

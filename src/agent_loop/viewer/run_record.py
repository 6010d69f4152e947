"""Settings and metrics of one run, read as far as a list or a chart needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

from agent_loop.errors import DataError
from agent_loop.runtime.numeric import as_finite_number
from agent_loop.storage.metrics_file import CONFIG_FILE, METRICS_FILE
from agent_loop.training.evaluation.runs import TrainingRun
from agent_loop.training.evaluation.summary import SUMMARY_FILE, EvaluationSummary, read_summary
from agent_loop.training.loggers import flat
from agent_loop.training.metrics import REWARD_MEAN, STEP, VALIDATION
from agent_loop.viewer.run_files import read_new_lines, stamp_of

ResultT = TypeVar("ResultT")
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
JOURNAL_FILE = "rollout.journal"
HELD_OUT = f"{VALIDATION}{REWARD_MEAN}"
LISTED = (REWARD_MEAN, HELD_OUT)
"""Metrics that the list of runs shows."""


class RunRecord:
    """Settings and metrics of the run in a folder. Files are read again when they change. Methods are thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept: dict[str, tuple[Any, Any]] = {}

    def settings(self) -> dict[str, Any]:
        """Return the settings by their dotted names; empty if there are none."""
        return self._read(CONFIG_FILE, _read_settings)

    def latest(self) -> dict[str, float]:
        """Return the last step, and the last values of the metrics that the list of runs shows."""
        curves = self.curves()
        found = {name: curve[max(curve)] for name in LISTED if (curve := curves.get(name))}
        steps = [step for curve in curves.values() for step in curve]
        return {STEP: max(steps), **found} if steps else {}

    def summary(self) -> EvaluationSummary | None:
        """Return the summary of an evaluation; None if there is none, or it cannot be read."""
        return self._read(SUMMARY_FILE, _read_summary)

    def _read(self, name: str, read: Callable[[Path], ResultT]) -> ResultT:
        """Return what a file holds, read again when the file changes."""
        stamp = stamp_of(self.folder / name)
        if name not in self._kept or self._kept[name][0] != stamp:
            self._kept[name] = stamp, read(self.folder / name)
        return self._kept[name][1]

    def curves(self) -> Mapping[str, Mapping[int, float]]:
        """Return the finite values of each metric by step."""
        return self._read(METRICS_FILE, _read_curves)

    def training_run(self) -> TrainingRun:
        """Return the metrics as `agent-loop compare` uses them."""
        seed = self.settings().get("trainer.seed")
        return TrainingRun(str(self.folder), seed if isinstance(seed, int) else None, self.curves())

    @property
    def is_unfinished_evaluation(self) -> bool:
        """Whether the folder is of an evaluation that has not ended, whose scores and trajectories are written at the
        end."""
        is_run = any((self.folder / name).exists() for name in (METRICS_FILE, CONFIG_FILE, SUMMARY_FILE))
        return not is_run and (self.folder / JOURNAL_FILE).exists()

    def changed_at(self) -> float:
        """Return the time of the last change, in seconds since 1970; 0 if unknown."""
        names = (METRICS_FILE, SUMMARY_FILE, JOURNAL_FILE, CONFIG_FILE)
        stamps = [stamp for name in names if (stamp := stamp_of(self.folder / name))]
        return max((stamp[0] / 1e9 for stamp in stamps), default=0.0)


def _read_summary(path: Path) -> EvaluationSummary | None:
    try:
        return read_summary(path) if path.is_file() else None
    except DataError:
        return None


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        loaded: Any = yaml.load(path.read_bytes(), LOADER)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return flat(cast(dict[str, Any], loaded)) if isinstance(loaded, dict) else {}


def _read_curves(path: Path) -> dict[str, dict[int, float]]:
    curves: dict[str, dict[int, float]] = {}
    for line in read_new_lines(path).lines:
        step = line.pop(STEP)
        for name, value in line.items():
            if (number := as_finite_number(value)) is not None:
                curves.setdefault(name, {})[step] = number
    return curves

"""Settings and metrics of one run, read as far as a list or a chart needs them."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from agent_loop.errors import DataError
from agent_loop.runtime.numeric import as_finite_number
from agent_loop.storage.metrics_file import CONFIG_FILE, METRICS_FILE, metrics_of
from agent_loop.training.evaluation.runs import TrainingRun
from agent_loop.training.evaluation.summary import SUMMARY_FILE, EvaluationSummary, read_summary
from agent_loop.training.loggers import flat
from agent_loop.training.metrics import REWARD_MEAN, STEP, VALIDATION
from agent_loop.viewer.run_files import read_new_lines, stamp_of

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
JOURNAL_FILE = "rollout.journal"
TAIL_BYTES = 1 << 18
"""Bytes at the end of a metrics file that are read first, and four times as many until the wanted metrics are found."""
MAX_TAIL_BYTES = 1 << 24
HELD_OUT = f"{VALIDATION}{REWARD_MEAN}"
LISTED = frozenset({STEP, REWARD_MEAN, HELD_OUT})
"""Metrics that the list of runs shows."""


class RunRecord:
    """Settings and metrics of the run in a folder. Files are read again when they change. Methods are thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._settings: tuple[Any, dict[str, Any]] = (None, {})
        self._latest: tuple[Any, dict[str, float]] = (None, {})
        self._summary: tuple[Any, EvaluationSummary | None] = (None, None)
        self._curves: dict[str, dict[int, float]] = {}
        self._cursor = ""

    def settings(self) -> dict[str, Any]:
        """Return the settings by their dotted names; empty if there are none."""
        stamp = stamp_of(self.folder / CONFIG_FILE)
        if stamp != self._settings[0]:
            self._settings = stamp, _read_settings(self.folder / CONFIG_FILE)
        return self._settings[1]

    def latest(self) -> dict[str, float]:
        """Return the last values of the metrics of `LISTED`. A value that is far from the file's end may be missing."""
        stamp = stamp_of(self.folder / METRICS_FILE)
        if stamp != self._latest[0]:
            self._latest = stamp, _read_latest(self.folder / METRICS_FILE)
        return self._latest[1]

    def summary(self) -> EvaluationSummary | None:
        """Return the summary of an evaluation; None if there is none, or it cannot be read."""
        stamp = stamp_of(self.folder / SUMMARY_FILE)
        if stamp != self._summary[0]:
            try:
                found = read_summary(self.folder) if stamp else None
            except DataError:
                found = None
            self._summary = stamp, found
        return self._summary[1]

    def curves(self) -> Mapping[str, Mapping[int, float]]:
        """Return the finite values of each metric by step."""
        with self._lock:
            new = read_new_lines(self.folder / METRICS_FILE, self._cursor)
            curves = {} if new.is_new else {name: {**curve} for name, curve in self._curves.items()}
            if not new.lines and not new.is_new:
                return self._curves
            self._cursor = new.cursor
            for line in new.lines:
                step = line.pop(STEP)
                for name, value in _numbers(line).items():
                    curves.setdefault(name, {})[step] = value
            self._curves = curves
            return curves

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


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        loaded: Any = yaml.load(path.read_bytes(), LOADER)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return flat(cast(dict[str, Any], loaded)) if isinstance(loaded, dict) else {}


def _read_latest(path: Path) -> dict[str, float]:
    num_bytes = TAIL_BYTES
    while True:
        try:
            latest, is_whole = _latest_in_tail(path, num_bytes)
        except OSError:
            return {}
        if is_whole or num_bytes >= MAX_TAIL_BYTES or latest.keys() == LISTED:
            return latest
        num_bytes *= 4


def _latest_in_tail(path: Path, num_bytes: int) -> tuple[dict[str, float], bool]:
    """Return the last values in the last bytes of a file, and whether these are the whole file."""
    with path.open("rb") as file:
        start = max(0, path.stat().st_size - num_bytes)
        file.seek(start)
        data = file.read()
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    latest: dict[str, float] = {}
    for line in reversed(lines[1:] if start else lines):
        try:
            values: Any = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict):
            metrics = metrics_of(cast(dict[str, Any], values))
            missing = LISTED & metrics.keys() - latest.keys()
            latest |= _numbers({name: metrics[name] for name in missing})
        if latest.keys() == LISTED:
            break
    return latest, start == 0


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, value in line.items():
        # Almost all values are floats, for which the general check is slow.
        if isinstance(value, float):
            if math.isfinite(value):
                numbers[name] = value
        elif (number := as_finite_number(value)) is not None:
            numbers[name] = number
    return numbers

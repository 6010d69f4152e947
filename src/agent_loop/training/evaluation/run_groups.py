"""Groups of training runs that differ in their seeds, read from their folders."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import glob, has_magic
from pathlib import Path
from typing import Any, cast

import yaml

from agent_loop.errors import DataError, did_you_mean
from agent_loop.files.file_kinds import RUN, explain, kind_of, only_run
from agent_loop.runtime.numeric import as_finite_number
from agent_loop.storage.metrics_file import CONFIG_FILE, METRICS_FILE, read_metrics
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
)
PASS_AT_K = re.compile(rf"{VALIDATION}pass@\d+")


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


def read_groups(sources: Sequence[str]) -> list[RunGroup]:
    """Return one group per source.

    Args:
        sources: Each is a glob, the folder of a run, a folder of runs, or several of these with commas between them.

    Raises:
        DataError: A source names no run or something else than runs, two groups share a run, or a file is damaged.
    """
    paths = [_find_runs(source) for source in sources]
    owners: dict[Path, int] = {}
    for index, found in enumerate(paths):
        for path in found:
            owner = owners.setdefault(path.resolve(), index)
            if owner != index:
                raise DataError(
                    f"{str(path)!r} is in the group {sources[owner]!r} and in {sources[index]!r}; give groups without "
                    "common runs"
                )
    return [
        RunGroup(source, tuple(map(read_run, found))) for source, found in zip(sources, paths, strict=True)
    ]


def read_run(path: Path) -> TrainingRun:
    """Return the metrics and the seed of the run in a folder. Values that are null or not finite are left out.

    Raises:
        DataError: The folder is not a training run, has no metrics, or a file is damaged.
    """
    if kind_of(path) is not RUN:
        raise DataError(explain(path, wanted=WANTED))
    file = path / METRICS_FILE
    if not file.is_file():
        raise DataError(
            f"{str(path)!r} has no {METRICS_FILE}, so no step of it ended; leave it out, or resume the run"
        )
    curves: dict[str, dict[int, float]] = {}
    for number, line in enumerate(read_metrics(file), start=1):
        step = _step_of(line)
        if step is None:
            raise DataError(
                f"{file} line {number} has no whole number {STEP!r}; correct that line, or copy the file again"
            )
        for name, value in line.items():
            finite = as_finite_number(value)
            if name != STEP and finite is not None:
                curves.setdefault(name, {})[step] = finite
    ordered = {name: dict(sorted(curve.items())) for name, curve in curves.items()}
    return TrainingRun(str(path), _seed_of(path / CONFIG_FILE), ordered)


def choose_metrics(groups: Sequence[RunGroup], *, patterns: Sequence[str] = ()) -> list[str]:
    """Return the names of the metrics to compare, which all runs have.

    Args:
        groups: The groups.
        patterns: Names, or globs such as `val/*`. By default the rewards, the share of successes and the scores of the
            validation are chosen, as far as all runs have them.

    Raises:
        DataError: A run lacks a metric, or no metric of all runs matches.
    """
    runs = [run for group in groups for run in group.runs]
    common = sorted(name for name in runs[0].curves if all(name in run.curves for run in runs))
    if not patterns:
        defaults = [name for name in DEFAULT_METRICS if name in common]
        defaults += sorted((name for name in common if PASS_AT_K.fullmatch(name)), key=_by_k)
        if not defaults:
            raise DataError(
                f"none of the metrics {', '.join(DEFAULT_METRICS)} is in all of {_names(runs)}; give one with "
                f"--metric{did_you_mean('', common)}"
            )
        return defaults
    chosen: list[str] = []
    for pattern in patterns:
        lacking = [run for run in runs if pattern not in run.curves]
        matches = [name for name in common if name == pattern or fnmatchcase(name, pattern)]
        if not matches:
            raise DataError(
                f"no value of the metric {pattern!r} is in {_names(lacking)}; leave these runs out, or give "
                f"another --metric{did_you_mean(pattern, common)}"
            )
        chosen += matches
    return list(dict.fromkeys(chosen))


def _find_runs(source: str) -> list[Path]:
    """Return the folders of the runs that a source names, each once."""
    parts = [source] if Path(source).exists() else [part.strip() for part in source.split(",")]
    found: dict[Path, Path] = {}
    for part in filter(None, parts):
        for path in _expand(part):
            for run in _runs_at(path):
                found.setdefault(run.resolve(), run)
    if not found:
        raise DataError(f"the group {source!r} names no run; give {WANTED}")
    return list(found.values())


def _expand(part: str) -> list[Path]:
    if Path(part).exists() or not has_magic(part):
        return [Path(part)]
    paths = [Path(path) for path in sorted(glob(part, recursive=True))]
    if not paths:
        raise DataError(f"no path matches {part!r}; give {WANTED}")
    return paths


def _runs_at(path: Path) -> list[Path]:
    """Return the run at a path, or the runs in that folder, such as `runs/a-1/train` in `runs/a-1` and in `runs`."""
    path = only_run(path)
    if not path.is_dir() or kind_of(path) is not None:
        return [path]
    inner = (only_run(folder) for folder in sorted(path.iterdir()) if folder.is_dir())
    return [folder for folder in inner if kind_of(folder) is RUN] or [path]


def _step_of(line: Any) -> int | None:
    step = cast(dict[str, Any], line).get(STEP) if isinstance(line, dict) else None
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _seed_of(file: Path) -> int | None:
    """Return `trainer.seed` of a configuration; None if the file does not exist or does not set it."""
    if not file.is_file():
        return None
    try:
        config: Any = yaml.safe_load(file.read_bytes())
    except yaml.YAMLError as error:
        raise DataError(f"{str(file)!r} is not YAML ({error}); copy the file again") from error
    trainer: Any = cast(dict[str, Any], config).get("trainer") if isinstance(config, dict) else None
    seed: Any = cast(dict[str, Any], trainer).get("seed") if isinstance(trainer, dict) else None
    return seed if isinstance(seed, int) else None


def _by_k(name: str) -> int:
    return int(name.rpartition("@")[2])


def _names(runs: Iterable[TrainingRun]) -> str:
    return ", ".join(repr(run.path) for run in runs)

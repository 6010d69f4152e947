"""Files of a run that hold trajectories."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FOLDER = "trajectories"
"""Folder of the files in a run's folder."""
_NAME = re.compile(r"(?P<split>[a-z]+)(?:\.[\w-]+)?-(?P<step>\d{6,})\.parquet")
_NUMBER = re.compile(r"(\d+)\.parquet$")


@dataclass(frozen=True, slots=True)
class StepFile:
    """File of a run, with the step and split in its name."""

    path: Path
    split: str
    step: int


def step_path(run_dir: Path, *, split: str, step: int, part: str = "") -> Path:
    """Return the path of a step's trajectories, such as `trajectories/train-000012.parquet`.

    Args:
        run_dir: The run's folder.
        split: `train` or `val`.
        step: The step.
        part: Name of one of several files of the step, such as `0-1` for `train.0-1-000012.parquet`.
    """
    return run_dir / FOLDER / f"{split}{part and f'.{part}'}-{step:06d}.parquet"


def step_files(run_dir: Path) -> list[StepFile]:
    """Return the files of a run, earliest first."""
    folder = run_dir / FOLDER
    if not folder.is_dir():
        return []
    named = ((path, _NAME.fullmatch(path.name)) for path in folder.iterdir())
    files = [StepFile(path, found["split"], int(found["step"])) for path, found in named if found]
    return sorted(files, key=lambda file: (file.step, file.split))


def parquet_files(path: Path) -> list[Path]:
    """Return the Parquet files of a run's folder or another folder, ordered by the number at the end of their names.

    Args:
        path: The folder, or one file, which is then returned alone.
    """
    if path.is_file():
        return [path]
    folder = path / FOLDER
    paths = (folder if folder.is_dir() else path).glob("[!.]*.parquet")
    return sorted(paths, key=lambda path: (_number_in(path.name), path.name))


def drop_steps_after(run_dir: Path, *, step: int) -> None:
    """Remove the files of later steps. A resumed run writes them again."""
    _remove(file for file in step_files(run_dir) if file.step > step)


def drop_all_but_newest(run_dir: Path, *, num_steps: int) -> None:
    """Remove the files of all but the newest `num_steps` steps."""
    files = step_files(run_dir)
    newest = sorted({file.step for file in files}, reverse=True)[:num_steps]
    _remove(file for file in files if file.step not in newest)


def _remove(files: Iterable[StepFile]) -> None:
    for file in files:
        file.path.unlink(missing_ok=True)


def _number_in(name: str) -> int:
    found = _NUMBER.search(name)
    return int(found[1]) if found else 0

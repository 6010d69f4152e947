"""Which files of a run hold trajectories."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FOLDER = "trajectories"
"""Of a run's folder."""
_NAME = re.compile(r"(?P<split>[a-z]+)-(?P<step>\d{6,})\.parquet")
_NUMBER = re.compile(r"(\d+)\.parquet$")


@dataclass(frozen=True, slots=True)
class StepFile:
    """One file of a run, by its name."""

    path: Path
    split: str
    step: int


def step_path(run_dir: Path, *, split: str, step: int) -> Path:
    """Where a step's trajectories are, as in `trajectories/train-000012.parquet`."""
    return run_dir / FOLDER / f"{split}-{step:06d}.parquet"


def step_files(run_dir: Path) -> list[StepFile]:
    """The files of a run, earliest first."""
    folder = run_dir / FOLDER
    if not folder.is_dir():
        return []
    named = ((path, _NAME.fullmatch(path.name)) for path in folder.iterdir())
    files = [StepFile(path, found["split"], int(found["step"])) for path, found in named if found]
    return sorted(files, key=lambda file: (file.step, file.split))


def parquet_files(path: Path) -> list[Path]:
    """All Parquet files of a run's folder or of any other folder, by the number at the end of their names; or the one
    that is given."""
    if path.is_file():
        return [path]
    folder = path / FOLDER
    paths = (folder if folder.is_dir() else path).glob("[!.]*.parquet")
    return sorted(paths, key=lambda path: (_number_in(path.name), path.name))


def drop_steps_after(run_dir: Path, *, step: int) -> None:
    """Removes what later steps wrote, so that a resumed run writes it anew."""
    _remove(file for file in step_files(run_dir) if file.step > step)


def drop_all_but_newest(run_dir: Path, *, num_steps: int) -> None:
    """Removes the files of all steps but so many."""
    files = step_files(run_dir)
    newest = sorted({file.step for file in files}, reverse=True)[:num_steps]
    _remove(file for file in files if file.step not in newest)


def _remove(files: Iterable[StepFile]) -> None:
    for file in files:
        file.path.unlink(missing_ok=True)


def _number_in(name: str) -> int:
    found = _NUMBER.search(name)
    return int(found[1]) if found else 0

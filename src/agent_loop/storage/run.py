"""Files of a run that hold trajectories, and their reader."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from agent_loop.errors import DataError
from agent_loop.files.file_kinds import explain
from agent_loop.storage.columns import SCALARS, SCHEMA
from agent_loop.storage.metrics_file import METRICS_FILE, read_metrics
from agent_loop.storage.schema import (
    METADATA,
    SCHEMA_VERSION,
    VOCABULARY_FILE,
    compute,
    mask_of_rows,
    pa,
    parquet,
)
from agent_loop.storage.vocabulary import Piece, read_vocabulary

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


def run_folder(path: Path) -> Path:
    """Return the folder of the run at a path, which may be that of a file of trajectories, or of their folder."""
    folder = path.parent if path.is_file() else path
    return folder.parent if folder.name == FOLDER else folder


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


KEY = ("split", "step", "trajectory_id")
"""Columns that identify a stored trajectory."""
Key: TypeAlias = tuple[str, int, str]
"""Values of `KEY`."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Parquet file of trajectories, with its metadata."""

    path: Path
    step: int | None
    """None if the file has several steps."""
    split: str | None
    """None if the file has several splits."""
    num_trajectories: int
    success_threshold: float


class StoredRun:
    """Stored trajectories of a run, read file by file without keeping them in memory.

    Args:
        path: The folder of a run, a folder of Parquet files, or one file.

    Raises:
        DataError: The path does not exist, or has no trajectories.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.folder = run_folder(self.path)
        """Folder of the vocabulary and the metrics."""
        if not self.path.exists():
            raise DataError(f"{str(path)!r} is not there; give the folder of a run")
        if not parquet_files(self.path):
            raise DataError(
                f"{str(path)!r} holds no stored trajectories; give the folder of a run that kept them "
                "(trainer.keep_trajectories), a folder of Parquet files, or one of them"
            )

    def files(self) -> list[StoredFile]:
        """Return the files, ordered by step and split.

        Raises:
            DataError: A file does not hold trajectories, or has a later version.
        """
        files = map(_described, parquet_files(self.path))
        return sorted(files, key=lambda file: (file.step or 0, file.split or "", file.path.name))

    def scalars(
        self, *, split: str | None = None, step: int | None = None, columns: Sequence[str] = SCALARS
    ) -> Any:
        """Return a pyarrow Table of all trajectories, in the order of the files.

        Args:
            split: Only trajectories of this split.
            step: Only trajectories of this step.
            columns: By default all columns with one number or name per row.
        """
        wanted = pa.schema([SCHEMA.field(name) for name in columns])
        tables = [wanted.empty_table()]
        for file in self._files_of(split=split, step=step):
            with _opened(file.path) as stored:
                table = stored.read([*{*columns, "split", "step"}])
            table = table.filter(mask_of_rows(table, split=split, step=step))
            tables.append(table.select(columns).replace_schema_metadata(None))
        return pa.concat_tables(tables)

    def trajectory(self, split: str, step: int, trajectory_id: str) -> dict[str, Any]:
        """Return all columns of one trajectory, with lists of numbers as numpy arrays.

        Raises:
            DataError: There is no such trajectory.
        """
        for row in self.rows(split=split, step=step, trajectory_id=trajectory_id):
            return row
        raise DataError(
            f"{str(self.path)!r} holds no trajectory {trajectory_id!r} of {split} step {step}; `agent-loop show` lists "
            "those that are there"
        )

    def rows(
        self, *, split: str | None = None, step: int | None = None, trajectory_id: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield trajectories with all columns, as `trajectory` returns them."""
        for file in self._files_of(split=split, step=step):
            yield from _rows_where(
                file, lambda keys: mask_of_rows(keys, split=split, step=step, trajectory_id=trajectory_id)
            )

    def rows_of(self, keys: Iterable[Key]) -> Iterator[dict[str, Any]]:
        """Yield the trajectories with these keys, in the order of the files. Each file is read at most once."""
        wanted = set(keys)
        places = {(split, step) for split, step, _ in wanted}

        def is_wanted(keys: Any) -> Any:
            return pa.array([tuple(row[name] for name in KEY) in wanted for row in keys.to_pylist()])

        for file in self.files():
            if any(file.split in (None, split) and file.step in (None, step) for split, step in places):
                yield from _rows_where(file, is_wanted)

    def vocabulary(self) -> list[Piece] | None:
        """Return the text of each token by its id, as bytes if these are not valid text; None if it was not stored."""
        path = self.folder / VOCABULARY_FILE
        return read_vocabulary(path) if path.is_file() else None

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of the run's metrics."""
        path = self.folder / METRICS_FILE
        return list(read_metrics(path)) if path.is_file() else []

    def _files_of(self, *, split: str | None, step: int | None) -> Iterator[StoredFile]:
        for file in self.files():
            is_of_split = None in (split, file.split) or split == file.split
            is_of_step = None in (step, file.step) or step == file.step
            if is_of_split and is_of_step:
                yield file


@contextmanager
def _opened(path: Path) -> Generator[Any]:
    """Open a file of trajectories to read its pages."""
    try:
        with parquet.ParquetFile(path) as stored:
            yield stored
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{str(path)!r} is damaged ({str(error).splitlines()[0]}); copy it again, or move it away to read the "
            "others"
        ) from error


def _described(path: Path) -> StoredFile:
    try:
        with parquet.ParquetFile(path) as stored:
            metadata = _text(stored.metadata.metadata or {})
            num_trajectories = int(stored.metadata.num_rows)
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            explain(path, wanted="the folder of a run, or a Parquet file of trajectories")
        ) from error
    version = metadata.get(METADATA.schema_version)
    if version != SCHEMA_VERSION:
        kind = (
            "no file of trajectories"
            if version is None
            else f"of version {version}, and this reads {SCHEMA_VERSION}"
        )
        raise DataError(f"{str(path)!r} is {kind}; give files that agent-loop wrote, or upgrade agent-loop")
    return StoredFile(
        path=path,
        step=int(metadata[METADATA.step]) if METADATA.step in metadata else None,
        split=metadata.get(METADATA.split),
        num_trajectories=num_trajectories,
        success_threshold=float(metadata[METADATA.success_threshold]),
    )


def _text(metadata: Mapping[bytes, bytes]) -> dict[str, str]:
    """Return a file's metadata as text. Other writers may have stored other bytes."""
    return {
        key.decode("utf-8", "replace"): value.decode("utf-8", "replace") for key, value in metadata.items()
    }


def _rows_where(file: StoredFile, mask_of: Callable[[Any], Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file that a mask of the columns `KEY` selects. Others are read only if a row matches."""
    with _opened(file.path) as stored:
        for group in range(stored.num_row_groups):
            mask = mask_of(stored.read_row_group(group, columns=[*KEY]))
            wanted: list[int] = compute.indices_nonzero(mask).to_pylist()
            if wanted:
                table = stored.read_row_group(group)
                for row in wanted:
                    yield {name: _value(table[name][row]) for name in table.column_names}


def _value(scalar: Any) -> Any:
    is_numbers = pa.types.is_list(scalar.type) and pa.types.is_primitive(scalar.type.value_type)
    if is_numbers and scalar.is_valid:
        return scalar.values.to_numpy(zero_copy_only=False)
    return scalar.as_py()

"""The stored trajectories of a run, file by file, as they come and go while it trains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_loop.storage.arrow import compute, mask_of_rows, pa, parquet
from agent_loop.storage.files import parquet_files
from agent_loop.storage.schema import SCALARS
from agent_loop.viewer.packets import is_plain


@dataclass(frozen=True, slots=True)
class SeenFile:
    """One Parquet file, as it was when it was seen."""

    number: int
    """Of this viewer's counting; a file that is written anew gets another one."""
    path: Path


@dataclass(frozen=True, slots=True)
class Place:
    """Where a trajectory is stored."""

    file: SeenFile
    row: int


class RunFiles:
    """Lists and reads them, and keeps their scalar columns. What is damaged, or gone by the time it is read, is left
    out and told of in `problems`: a run may write and remove files at any time.

    Args:
        path: The folder of a run, a folder of Parquet files, or one of them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known: dict[tuple[Any, ...], SeenFile] = {}
        self._scalars: dict[int, Any] = {}
        self._num_seen = 0
        self.problems: dict[int, str] = {}
        """By number of the file."""

    def refresh(self) -> Sequence[SeenFile]:
        """The files that are there, in the order of their steps."""
        with self._lock:
            stamps = {
                stamp: path for path in parquet_files(self._path) if (stamp := _stamp(path)) is not None
            }
            for stamp, path in stamps.items():
                if stamp not in self._known:
                    self._known[stamp] = SeenFile(self._num_seen, path)
                    self._num_seen += 1
            for stamp in [stamp for stamp in self._known if stamp not in stamps]:
                gone = self._known.pop(stamp).number
                self._scalars.pop(gone, None)
                self.problems.pop(gone, None)
            return [self._known[stamp] for stamp in stamps]

    def scalars(self, file: SeenFile) -> Any:
        """A pyarrow Table of what a table shows of it, one row per trajectory; None if it cannot be read."""
        known = self._scalars.get(file.number)
        if known is None and file.number not in self.problems:
            known = self._read(file, _is_scalar)
            if known is not None:
                self._scalars[file.number] = known
        return known

    def columns(self, file: SeenFile, names: Iterable[str]) -> Any:
        """A pyarrow Table of those of these columns that it has; None if it cannot be read."""
        wanted = frozenset(names)

        def is_wanted(field: Any) -> bool:
            return field.name in wanted

        return self._read(file, is_wanted)

    def find(self, *, split: str, step: int, trajectory_id: str | None = None) -> list[Place]:
        """Where a step's trajectories are stored, or one of them."""
        wanted = {"split": split, "step": step, "trajectory_id": trajectory_id}
        wanted = {name: value for name, value in wanted.items() if value is not None}
        places: list[Place] = []
        for file in self.refresh():
            table = self.scalars(file)
            if table is not None and wanted.keys() <= {*table.column_names}:
                rows = compute.indices_nonzero(mask_of_rows(table, **wanted)).to_pylist()
                places += [Place(file, row) for row in rows]
        return places

    def _read(self, file: SeenFile, is_wanted: Callable[[Any], bool]) -> Any:
        try:
            with parquet.ParquetFile(file.path) as stored:
                return stored.read([field.name for field in stored.schema_arrow if is_wanted(field)])
        except (OSError, pa.ArrowException) as error:
            self.problems[file.number] = f"{file.path.name}: {str(error).splitlines()[0]}"
            return None


def _is_scalar(field: Any) -> bool:
    """Strings that nobody knows may be long: they are not read for a table."""
    return is_plain(field.type) and (field.name in SCALARS or not pa.types.is_string(field.type))


def _stamp(path: Path) -> tuple[Any, ...] | None:
    """What changes when a file is written anew; None if it is gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    return path, status.st_ino, status.st_mtime_ns, status.st_size

"""Files of a run, which may be added, extended and removed while the run trains, and the search in them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from agent_loop.storage.columns import SCALARS
from agent_loop.storage.metrics_file import metrics_of
from agent_loop.storage.row_texts import SOURCES, text_columns
from agent_loop.storage.run import parquet_files
from agent_loop.storage.schema import compute, mask_of_rows, pa, parquet
from agent_loop.viewer.packets import is_sendable


@dataclass(frozen=True, slots=True)
class RunFile:
    """One version of a Parquet file."""

    number: int
    """Number that the viewer assigned. A file that is rewritten gets a new number."""
    path: Path


class RunFiles:
    """Parquet files of a run, with a cache of the columns that the table shows.

    A run may write and remove files at any time. Files that are damaged or gone are skipped and listed in `problems`.

    Args:
        path: Folder of a run, a folder of Parquet files, or one Parquet file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known: dict[tuple[Any, ...], RunFile] = {}
        self._scalars: dict[int, Any] = {}
        self._num_seen = 0
        self.problems: dict[int, str] = {}
        """Error of each unreadable file, by the number of the file."""

    def refresh(self) -> Sequence[RunFile]:
        """Return the files that exist, in the order of their steps."""
        with self._lock:
            stamps = {
                (path, stamp): path
                for path in parquet_files(self._path)
                if (stamp := stamp_of(path)) is not None
            }
            for stamp, path in stamps.items():
                if stamp not in self._known:
                    self._known[stamp] = RunFile(self._num_seen, path)
                    self._num_seen += 1
            for stamp in [stamp for stamp in self._known if stamp not in stamps]:
                gone = self._known.pop(stamp).number
                self._scalars.pop(gone, None)
                self.problems.pop(gone, None)
            return [self._known[stamp] for stamp in stamps]

    def scalars(self, file: RunFile) -> Any:
        """Return a pyarrow Table of the scalar columns and short texts, one row per trajectory.

        None if the file cannot be read.
        """
        known = self._scalars.get(file.number)
        if known is None and file.number not in self.problems:
            table = self._read(file, _is_listed)
            if table is not None:
                known = self._scalars[file.number] = _with_texts(table)
        return known

    def columns(self, file: RunFile, names: Iterable[str]) -> Any:
        """Return a pyarrow Table of the named columns that the file has; None if the file cannot be read."""
        wanted = frozenset(names)

        def is_wanted(field: Any) -> bool:
            return field.name in wanted

        return self._read(file, is_wanted)

    def find(
        self, *, split: str, step: int, trajectory_id: str | None = None
    ) -> Iterator[tuple[RunFile, list[int]]]:
        """Yield the files with trajectories of a step, or with one trajectory, and the rows of these."""
        wanted = {"split": split, "step": step, "trajectory_id": trajectory_id}
        wanted = {name: value for name, value in wanted.items() if value is not None}
        for file in self.refresh():
            table = self.scalars(file)
            if table is not None and wanted.keys() <= {*table.column_names}:
                rows = compute.indices_nonzero(mask_of_rows(table, **wanted)).to_pylist()
                if rows:
                    yield file, rows

    def file_of(self, split: str, step: int, trajectory_id: str) -> RunFile | None:
        """Return the newest file with a trajectory; None if it is not stored."""
        found = [file for file, _ in self.find(split=split, step=step, trajectory_id=trajectory_id)]
        return found[-1] if found else None

    def _read(self, file: RunFile, is_wanted: Callable[[Any], bool]) -> Any:
        try:
            with parquet.ParquetFile(file.path) as stored:
                return stored.read([field.name for field in stored.schema_arrow if is_wanted(field)])
        except (OSError, pa.ArrowException) as error:
            self.problems[file.number] = f"{file.path.name}: {str(error).splitlines()[0]}"
            return None


def _is_listed(field: Any) -> bool:
    """Return whether the table needs a column. Unknown string columns may be long, and are not shown."""
    is_short = field.name in SCALARS or not pa.types.is_string(field.type)
    return is_sendable(field.type) and (is_short or field.name in SOURCES)


def _with_texts(table: Any) -> Any:
    """Return a table with short texts and reward parts in place of the columns that hold them."""
    texts = text_columns(table)
    table = table.drop_columns([name for name in SOURCES if name in table.column_names])
    for name, column in texts.items():
        if name not in table.column_names:
            table = table.append_column(name, column)
    return table


def stamp_of(path: Path) -> tuple[int, int, int] | None:
    """Return a key that changes when a file changes, which begins with the time in nanoseconds; None if it is gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


@dataclass(frozen=True, slots=True)
class NewMetrics:
    """Metrics that the page does not have yet."""

    cursor: str
    """Opaque position in the file, to pass to the next call."""
    is_new: bool
    """Whether the file was replaced, so that the page has to drop its metrics."""
    lines: list[dict[str, Any]]
    num_damaged: int


def read_new_lines(path: Path, cursor: str = "") -> NewMetrics:
    """Return the lines after a cursor. An incomplete last line is left for the next call."""
    try:
        with path.open("rb") as file:
            inode = path.stat().st_ino
            start = _offset_of(cursor, inode=inode, size=path.stat().st_size)
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return NewMetrics("", is_new=bool(cursor), lines=[], num_damaged=0)
    whole = data[: data.rfind(b"\n") + 1]
    parsed = [_parse_line(line) for line in whole.splitlines() if line.strip()]
    lines = [line for line in parsed if line is not None]
    is_new = bool(cursor) and start == 0
    return NewMetrics(f"{inode}-{start + len(whole)}", is_new, lines, len(parsed) - len(lines))


def _offset_of(cursor: str, *, inode: int, size: int) -> int:
    """Return the offset of a cursor in the file; 0 if the cursor is empty or belongs to another file."""
    before, _, offset = cursor.partition("-")
    fits = before == str(inode) and offset.isdecimal() and int(offset) <= size
    return int(offset) if fits else 0


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    if not isinstance(values, dict):
        return None
    metrics = metrics_of(cast(dict[str, Any], values))
    return metrics if isinstance(metrics.get("step"), int) else None


TEXT_COLUMNS = (
    "answer",
    "failure",
    "failure_traceback",
    "messages",
    "incidents",
    "feedback",
    "row",
    "reward_extra",
)
"""Columns in which the page searches."""

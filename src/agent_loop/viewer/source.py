"""Data of one run, as the page requests it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from agent_loop.errors import DataError
from agent_loop.storage import StoredRun
from agent_loop.storage.metrics_file import METRICS_FILE
from agent_loop.storage.query import contains
from agent_loop.storage.run import run_folder
from agent_loop.storage.schema import VOCABULARY_FILE, compute, pa
from agent_loop.storage.vocabulary import Piece
from agent_loop.viewer.packets import packet
from agent_loop.viewer.run_files import TEXT_COLUMNS, RunFiles, read_new_lines
from agent_loop.viewer.trajectory import timeline, trajectory_packet

CONFIG_FILE = "config.yaml"
FILE_COLUMN = "file"
ROW_COLUMN = "row_in_file"


class RunSource:
    """Read-only access to a run. Methods are thread-safe.

    Args:
        path: Folder of a run, a folder of Parquet files, or one Parquet file.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise DataError(
                f"there is no run at {str(path)!r}; give the folder of a run, or one of its Parquet files"
            )
        self.path = path
        self.files = RunFiles(path)
        self.folder = run_folder(path)
        """Folder of the settings, the metrics and the vocabulary."""
        if (
            not self.files.refresh()
            and not (self.folder / METRICS_FILE).exists()
            and not (self.folder / CONFIG_FILE).exists()
        ):
            raise DataError(
                f"{str(path)!r} holds no run: it has neither {METRICS_FILE} nor {CONFIG_FILE} nor stored trajectories; "
                "give the folder that trainer.run_dir or --out names"
            )
        self._session = secrets.token_hex(4)
        self._vocabulary: tuple[float, Sequence[Piece]] = (0.0, ())

    def state(self) -> dict[str, Any]:
        """Return the current files and the time of the last change. File numbers are valid within a `session`."""
        files = self.files.refresh()
        paths = [self.folder / METRICS_FILE, *(file.path for file in files[-1:])]
        return {
            "session": self._session,
            "name": self.path.resolve().name,
            "path": str(self.path.resolve()),
            "files": [file.number for file in files],
            "problems": sorted(self.files.problems.values()),
            "now": time.time(),
            "changed_at": max((_modified_at(path) for path in paths), default=0.0),
        }

    def config(self) -> Any:
        """Return the configuration as plain values; None if it is missing or cannot be read."""
        try:
            return yaml.safe_load((self.folder / CONFIG_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            return None

    def metrics(self, cursor: str = "") -> dict[str, Any]:
        """Return the metrics after the cursor of the previous call."""
        return asdict(read_new_lines(self.folder / METRICS_FILE, cursor))

    def table(self, numbers: Sequence[int]) -> bytes:
        """Return the scalar columns of these files as a packet. Files that are gone are skipped."""
        wanted = set(numbers)
        tables: list[Any] = []
        for file in self.files.refresh():
            if file.number in wanted and (table := self.files.scalars(file)) is not None:
                numbered = table.append_column(FILE_COLUMN, _constant(file.number, table.num_rows))
                tables.append(numbered.append_column(ROW_COLUMN, pa.array(range(table.num_rows), pa.int32())))
        whole = pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})
        return packet({}, {name: whole[name] for name in whole.column_names})

    def trajectory(self, *, split: str, step: int, trajectory_id: str) -> bytes:
        """Return one trajectory in full as a packet."""
        file = self.files.file_of(split, step, trajectory_id)
        if file is None:
            raise DataError(
                f"no trajectory {trajectory_id} of {split} step {step} is stored; it may have been removed"
            )
        row = StoredRun(file.path).trajectory(split, step, trajectory_id)
        return trajectory_packet(row, self.pieces())

    def timeline(self, *, split: str, step: int) -> list[dict[str, Any]]:
        """Return the times and spans of the trajectories of a step."""
        return timeline(self.files, split=split, step=step)

    def search(self, text: str, numbers: Sequence[int]) -> dict[int, list[int]]:
        """Return the rows of these files that contain a text, by the number of the file."""
        wanted = set(numbers)
        files = [file for file in self.files.refresh() if file.number in wanted]
        tables = {file.number: self.files.columns(file, TEXT_COLUMNS) for file in files}
        return {
            number: []
            if not text or table is None
            else compute.indices_nonzero(contains(table, text)).to_pylist()
            for number, table in tables.items()
        }

    def pieces(self) -> Sequence[Piece]:
        """Return the vocabulary, reloaded when its file changes; empty until the file exists."""
        modified_at = _modified_at(self.folder / VOCABULARY_FILE)
        if modified_at != self._vocabulary[0]:
            self._vocabulary = modified_at, StoredRun(self.path).vocabulary() or ()
        return self._vocabulary[1]


def _constant(value: int, length: int) -> Any:
    return pa.array([value] * length, pa.int32())


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0

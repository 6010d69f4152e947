"""All that the page asks for, of one run."""

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
from agent_loop.storage.arrow import pa
from agent_loop.storage.files import FOLDER
from agent_loop.storage.metrics_file import METRICS_FILE
from agent_loop.storage.schema import VOCABULARY_FILE
from agent_loop.storage.vocabulary import Piece
from agent_loop.viewer.metrics_tail import read_on
from agent_loop.viewer.packets import packet
from agent_loop.viewer.run_files import RunFiles
from agent_loop.viewer.search import rows_with
from agent_loop.viewer.timeline import timeline
from agent_loop.viewer.trajectory import trajectory_packet

CONFIG_FILE = "config.yaml"
FILE_COLUMN = "file"
ROW_COLUMN = "row_in_file"


class RunSource:
    """Reads a run, and never writes to it. Methods may be called from several threads.

    Args:
        path: The folder of a run, a folder of Parquet files, or one of them.

    Raises:
        DataError: There is no such run.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise DataError(
                f"there is no run at {str(path)!r}; give the folder of a run, or a Parquet file of one"
            )
        self.path = path
        self.files = RunFiles(path)
        folder = path if path.is_dir() else path.parent
        self._folder = folder.parent if folder.name == FOLDER else folder
        if (
            not self.files.refresh()
            and not (self._folder / METRICS_FILE).exists()
            and not (self._folder / CONFIG_FILE).exists()
        ):
            raise DataError(
                f"{str(path)!r} holds no run: neither {METRICS_FILE} nor {CONFIG_FILE} nor stored trajectories; "
                "give the folder that trainer.run_dir or --out names"
            )
        self._session = secrets.token_hex(4)
        self._vocabulary: tuple[float, Sequence[Piece]] = (0.0, ())

    def warm_up(self) -> None:
        """Reads what the first page asks for first."""
        self.table(self.state()["files"][-2:])

    def state(self) -> dict[str, Any]:
        """What is there by now. Numbers of files hold within a `session`."""
        files = self.files.refresh()
        paths = [self._folder / METRICS_FILE, *(file.path for file in files[-1:])]
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
        """The configuration as plain values; None if there is none that can be read."""
        try:
            return yaml.safe_load((self._folder / CONFIG_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            return None

    def metrics(self, place: str = "") -> dict[str, Any]:
        """The lines after a place, which is what the last answer said."""
        return asdict(read_on(self._folder / METRICS_FILE, place))

    def table(self, numbers: Sequence[int]) -> bytes:
        """The scalar columns of these files, those that are gone left out."""
        wanted = set(numbers)
        tables: list[Any] = []
        for file in self.files.refresh():
            if file.number in wanted and (table := self.files.scalars(file)) is not None:
                numbered = table.append_column(FILE_COLUMN, _constant(file.number, table.num_rows))
                tables.append(numbered.append_column(ROW_COLUMN, pa.array(range(table.num_rows), pa.int32())))
        whole = pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})
        return packet({}, {name: whole[name] for name in whole.column_names})

    def trajectory(self, *, split: str, step: int, trajectory_id: str) -> bytes:
        """One of them in full.

        Raises:
            DataError: It is not there, or cannot be read.
        """
        places = self.files.find(split=split, step=step, trajectory_id=trajectory_id)
        if not places:
            raise DataError(
                f"no trajectory {trajectory_id} of {split} step {step} is stored; it may have been removed"
            )
        row = StoredRun(places[-1].file.path).trajectory(split, step, trajectory_id)
        return trajectory_packet(row, self._pieces())

    def timeline(self, *, split: str, step: int) -> list[dict[str, Any]]:
        """What the trajectories of a step did when."""
        return timeline(self.files, split=split, step=step)

    def search(self, text: str, numbers: Sequence[int]) -> dict[int, list[int]]:
        """The rows of these files that contain a text, by number of the file."""
        wanted = set(numbers)
        files = [file for file in self.files.refresh() if file.number in wanted]
        return {file.number: rows_with(text, file=file, files=self.files) for file in files}

    def _pieces(self) -> Sequence[Piece]:
        """The vocabulary, read again when it changed; empty until it is there."""
        modified_at = _modified_at(self._folder / VOCABULARY_FILE)
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

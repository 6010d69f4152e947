"""Reads what a run stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_loop.errors import DataError
from agent_loop.files.file_kinds import explain
from agent_loop.storage.arrow import compute, mask_of_rows, pa, parquet
from agent_loop.storage.files import FOLDER, parquet_files
from agent_loop.storage.metrics_file import METRICS_FILE, read_metrics
from agent_loop.storage.schema import METADATA, SCALARS, SCHEMA, SCHEMA_VERSION, VOCABULARY_FILE
from agent_loop.storage.vocabulary import Piece, read_vocabulary


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One Parquet file of trajectories, and what it says of itself."""

    path: Path
    step: int | None
    """None where it holds several."""
    split: str | None
    """The same."""
    num_trajectories: int
    success_threshold: float


class StoredRun:
    """The trajectories of a run, file by file; nothing is kept in memory.

    Args:
        path: The folder of a run, a folder of Parquet files, or one of them.

    Raises:
        DataError: It is not there, or holds none.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.folder = self.path.parent if self.path.is_file() else self.path
        """Where the vocabulary and the metrics are."""
        if self.folder.name == FOLDER:
            self.folder = self.folder.parent
        if not self.path.exists():
            raise DataError(f"{str(path)!r} is not there; give the folder of a run")
        if not parquet_files(self.path):
            raise DataError(
                f"{str(path)!r} holds no stored trajectories; give the folder of a run that kept them "
                "(trainer.keep_trajectories), a folder of Parquet files, or one of them"
            )

    def files(self) -> list[StoredFile]:
        """Those that are there, by step and split.

        Raises:
            DataError: One is no file of trajectories, or of a later version.
        """
        files = map(_described, parquet_files(self.path))
        return sorted(files, key=lambda file: (file.step or 0, file.split or "", file.path.name))

    def scalars(
        self, *, split: str | None = None, step: int | None = None, columns: Sequence[str] = SCALARS
    ) -> Any:
        """A pyarrow Table of all trajectories, in the order of the files.

        Args:
            split: Only of this one.
            step: Only of this one.
            columns: By default all that hold one number or name.
        """
        wanted = pa.schema([SCHEMA.field(name) for name in columns])
        tables = [wanted.empty_table()]
        for file in self._files_of(split=split, step=step):
            table = parquet.read_table(file.path, partitioning=None, columns=[*{*columns, "split", "step"}])
            table = table.filter(mask_of_rows(table, split=split, step=step))
            tables.append(table.select(columns).replace_schema_metadata(None))
        return pa.concat_tables(tables)

    def trajectory(self, split: str, step: int, trajectory_id: str) -> dict[str, Any]:
        """All columns of one trajectory; lists of numbers are numpy arrays.

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
        """Trajectories one by one, with all columns, as `trajectory` gives them."""
        for file in self._files_of(split=split, step=step):
            with parquet.ParquetFile(file.path) as stored:
                for group in range(stored.num_row_groups):
                    yield from _rows_of(stored, group, split=split, step=step, trajectory_id=trajectory_id)

    def vocabulary(self) -> list[Piece] | None:
        """The text of each token by its id, bytes where they are no text by themselves; None if it is not there."""
        path = self.folder / VOCABULARY_FILE
        return read_vocabulary(path) if path.is_file() else None

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of the run's metrics; none if it has none."""
        path = self.folder / METRICS_FILE
        return list(read_metrics(path)) if path.is_file() else []

    def _files_of(self, *, split: str | None, step: int | None) -> Iterator[StoredFile]:
        for file in self.files():
            is_of_split = None in (split, file.split) or split == file.split
            is_of_step = None in (step, file.step) or step == file.step
            if is_of_split and is_of_step:
                yield file


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
    """What other writers put there need not be text."""
    return {
        key.decode("utf-8", "replace"): value.decode("utf-8", "replace") for key, value in metadata.items()
    }


def _rows_of(
    stored: Any, group: int, *, split: str | None, step: int | None, trajectory_id: str | None
) -> Iterator[dict[str, Any]]:
    """Of one group of rows; the large columns are read only if one of them is asked for."""
    names = stored.read_row_group(group, columns=["split", "step", "trajectory_id"])
    mask = mask_of_rows(names, split=split, step=step, trajectory_id=trajectory_id)
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

"""Writer of trajectories to Parquet files, and a background writer for those of a training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from agent_loop.runtime.background_writer import BackgroundWriter
from agent_loop.storage.columns import SCHEMA, Learned, StepFacts, columns_of
from agent_loop.storage.exclusive import whole_file
from agent_loop.storage.run import drop_all_but_newest, step_path
from agent_loop.storage.schema import (
    METADATA,
    ROWS_PER_GROUP,
    SCHEMA_VERSION,
    VOCABULARY_FILE,
    pa,
    parquet,
)
from agent_loop.storage.vocabulary import write_vocabulary
from agent_loop.trajectory import Trajectory

Write: TypeAlias = Callable[[], None]
SPREAD_BYTES = ("response_logprobs", "train_logprobs")
"""Columns of distinct floats, which compress better with their bytes split into streams."""


def write_trajectories(
    path: Path,
    trajectories: Sequence[Trajectory],
    *,
    step: int,
    split: str,
    weight_version: int | None = None,
    success_threshold: float = 1.0,
    learned: Sequence[Learned | None] | None = None,
) -> None:
    """Write a Parquet file with the columns of `storage.schema`, one row per trajectory.

    Args:
        path: The file. It is replaced once the new file is complete.
        trajectories: Any number, including none.
        step: Training step; 0 outside of training.
        split: `train`, `val`, `eval` or `rollout`.
        weight_version: Weight version of the trainer when the step began; None outside of training.
        success_threshold: Least reward that counts as a success.
        learned: Values that training computed for each trajectory; None if there was no training.

    Raises:
        OSError: The file cannot be written; an existing file is unchanged.
    """
    facts = StepFacts(step, split, weight_version, success_threshold)
    pairs = zip(trajectories, learned or [None] * len(trajectories), strict=True)
    rows = (columns_of(trajectory, facts=facts, learned=its) for trajectory, its in pairs)
    _write(path, rows, step=str(step), split=split, success_threshold=success_threshold)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], *, success_threshold: float) -> None:
    """Write rows of one or more steps, such as those of `StoredRun.rows`.

    Raises:
        OSError: The file cannot be written; an existing file is unchanged.
    """
    shared = {name: {str(row[name]) for row in rows} for name in ("step", "split")}
    facts = {name: values.pop() for name, values in shared.items() if len(values) == 1}
    _write(path, rows, **facts, success_threshold=success_threshold)


def _write(path: Path, rows: Iterable[Mapping[str, Any]], *, success_threshold: float, **facts: str) -> None:
    """Write rows, with the step and the split that they share."""
    metadata = {getattr(METADATA, name): value for name, value in facts.items()}
    metadata[METADATA.schema_version] = SCHEMA_VERSION
    metadata[METADATA.success_threshold] = repr(success_threshold)
    left = iter(rows)
    with (
        whole_file(path) as temporary,
        parquet.ParquetWriter(temporary, SCHEMA.with_metadata(metadata), **_options()) as writer,
    ):
        while chunk := list(islice(left, ROWS_PER_GROUP)):
            writer.write_table(pa.Table.from_pylist(chunk, schema=SCHEMA), row_group_size=ROWS_PER_GROUP)


def _options() -> dict[str, Any]:
    leaves = [f"{name}.list.element" for name in SPREAD_BYTES]
    return {
        "compression": "zstd",
        "use_dictionary": [leaf for leaf in _leaves() if leaf not in (*leaves, "extras.list.element.data")],
        "column_encoding": dict.fromkeys(leaves, "BYTE_STREAM_SPLIT"),
        "write_statistics": [field.name for field in SCHEMA if not pa.types.is_nested(field.type)],
    }


def _leaves() -> list[str]:
    """Return the paths of Parquet's columns of numbers and texts."""
    leaves: list[str] = []
    for field in SCHEMA:
        if not pa.types.is_list(field.type):
            leaves.append(field.name)
        elif pa.types.is_struct(field.type.value_type):
            inner = [inner for inner in field.type.value_type if not pa.types.is_list(inner.type)]
            leaves += [f"{field.name}.list.element.{each.name}" for each in inner]
        else:
            leaves.append(f"{field.name}.list.element")
    return leaves


logger = logging.getLogger(__name__)
MAX_WAITING = 8
"""Maximum number of files that wait to be written. Further ones are dropped, so that memory does not fill up."""
CLOSE_TIMEOUT_S = 120.0
"""Seconds that the end of a run waits for pending writes."""


class TrajectoryKeeper:
    """Writer of each step's trajectories to a file of the run's folder, in a thread.

    A failed write is counted and reported once per kind of error, and does not stop the run. The end of the `with`
    block waits for all writes, unless a cancellation or a second Ctrl-C ends it.

    Args:
        run_dir: The run's folder.
        num_steps: Number of newest steps whose files are kept; None keeps all, 0 none.
        success_threshold: Least reward that counts as a success.
        report: Function that reports an error to the user, called in the thread.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        num_steps: int | None = None,
        success_threshold: float = 1.0,
        report: Callable[[str], None] = logger.warning,
    ) -> None:
        self._run_dir = run_dir
        self._num_steps = num_steps
        self._success_threshold = success_threshold
        self._writer = BackgroundWriter[Write](
            _Calls(), name="trajectories", max_queued=MAX_WAITING, report=report
        )

    @property
    def num_failed(self) -> int:
        """Number of files that were not written."""
        return self._writer.num_dropped

    def keep_vocabulary(self, tokenizer: Any) -> None:
        """Write the text of each token, for readers that have no tokenizer."""
        self._put(partial(write_vocabulary, self._run_dir / VOCABULARY_FILE, tokenizer))

    def keep(
        self,
        trajectories: Sequence[Trajectory],
        *,
        step: int,
        split: str,
        weight_version: int,
        learned: Sequence[Learned] | None = None,
    ) -> None:
        """Queue a step's trajectories. The arguments are those of `write_trajectories`."""
        write = partial(
            write_trajectories,
            step_path(self._run_dir, split=split, step=step),
            trajectories,
            step=step,
            split=split,
            weight_version=weight_version,
            success_threshold=self._success_threshold,
            learned=learned,
        )
        self._put(write)

    def __enter__(self) -> TrajectoryKeeper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_hurried = kind is not None and not issubclass(kind, Exception)
        self._writer.close(timeout_s=0.0 if is_hurried else CLOSE_TIMEOUT_S)

    def _put(self, write: Write) -> None:
        if self._num_steps != 0:
            self._writer.put(partial(self._write, write))

    def _write(self, write: Write) -> None:
        write()
        if self._num_steps is not None:
            drop_all_but_newest(self._run_dir, num_steps=self._num_steps)


class _Calls:
    """Writer whose items are functions that write."""

    max_batch = 1

    def open(self) -> None:
        pass

    def write(self, items: Iterable[Write], /) -> None:
        for write in items:
            write()

    def close(self) -> None:
        pass

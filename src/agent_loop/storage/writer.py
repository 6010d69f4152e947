"""Writer of trajectories to Parquet files, and a background writer for those of a training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.threads import OneThread
from agent_loop.storage.columns import Learned, StepFacts, columns_of, to_json
from agent_loop.storage.exclusive import whole_file
from agent_loop.storage.run import drop_all_but_newest, step_path
from agent_loop.storage.schema import (
    METADATA,
    ROWS_PER_GROUP,
    SCHEMA,
    SCHEMA_VERSION,
    VOCABULARY_FILE,
    pa,
    parquet,
)
from agent_loop.storage.vocabulary import write_vocabulary
from agent_loop.trajectory import Trajectory

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
    learned = learned or [None] * len(trajectories)
    metadata = {
        METADATA.schema_version: SCHEMA_VERSION,
        METADATA.step: str(step),
        METADATA.split: split,
        METADATA.success_threshold: repr(success_threshold),
    }
    chunks = (
        [
            columns_of(trajectory, facts=facts, learned=its)
            for trajectory, its in zip(
                trajectories[start : start + ROWS_PER_GROUP],
                learned[start : start + ROWS_PER_GROUP],
                strict=True,
            )
        ]
        for start in range(0, len(trajectories), ROWS_PER_GROUP)
    )
    _write(path, chunks, metadata=metadata)


def rewrite_scores(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    scores: Sequence[tuple[float | None, Mapping[str, Any]]],
    *,
    success_threshold: float,
) -> None:
    """Write stored rows with other rewards and no other changes.

    Args:
        path: The file. It is replaced once the new file is complete.
        rows: Rows of `StoredRun.rows`, of one or more steps.
        scores: Reward of each row, and further values that the reward function returned.
        success_threshold: Least reward that counts as a success.

    Raises:
        OSError: The file cannot be written; an existing file is unchanged.
    """
    changed = [
        {
            **row,
            "reward": reward,
            "reward_extra": to_json(extra),
            "is_success": reward is not None and reward >= success_threshold,
        }
        for row, (reward, extra) in zip(rows, scores, strict=True)
    ]
    write_rows(path, changed, success_threshold=success_threshold)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], *, success_threshold: float) -> None:
    """Write rows of one or more steps, with the columns of `storage.schema`.

    Raises:
        OSError: The file cannot be written; an existing file is unchanged.
    """
    metadata = {
        METADATA.schema_version: SCHEMA_VERSION,
        METADATA.success_threshold: repr(success_threshold),
    }
    for key, column in ((METADATA.step, "step"), (METADATA.split, "split")):
        held = {str(row[column]) for row in rows}
        if len(held) == 1:
            metadata[key] = held.pop()
    starts = range(0, len(rows), ROWS_PER_GROUP)
    _write(path, (rows[start : start + ROWS_PER_GROUP] for start in starts), metadata=metadata)


def _write(path: Path, chunks: Iterable[Sequence[Mapping[str, Any]]], *, metadata: Mapping[str, str]) -> None:
    """Write each chunk as one row group."""
    with (
        whole_file(path) as temporary,
        parquet.ParquetWriter(temporary, SCHEMA.with_metadata(metadata), **_options()) as writer,
    ):
        for chunk in chunks:
            writer.write_table(_table(chunk), row_group_size=ROWS_PER_GROUP)


def _table(rows: Sequence[Mapping[str, Any]]) -> Any:
    columns = [pa.array([row.get(field.name) for row in rows], type=field.type) for field in SCHEMA]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


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
MAX_WAITING_TOKENS = 50_000_000
"""Maximum tokens that wait to be written. Further trajectories are dropped, so that memory does not fill up."""
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
        report: Function that reports an error to the user, called in the thread. None writes to the log.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        num_steps: int | None = None,
        success_threshold: float = 1.0,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._num_steps = num_steps
        self._success_threshold = success_threshold
        self._report = report or logger.warning
        self._lock = threading.Lock()
        self._num_failed = 0
        self._num_waiting_tokens = 0
        self._reported: set[str] = set()
        self._thread: OneThread | None = None

    @property
    def num_failed(self) -> int:
        """Number of files that were not written."""
        return self._num_failed

    def keep_vocabulary(self, tokenizer: Any) -> None:
        """Write the text of each token, for readers that have no tokenizer."""
        path = self._run_dir / VOCABULARY_FILE
        self._queue(partial(write_vocabulary, path, tokenizer), what="the vocabulary", num_tokens=0)

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
        num_tokens = sum(len(segment) for t in trajectories for segment in t.output.segments)
        self._queue(write, what=f"the {split} trajectories of step {step}", num_tokens=num_tokens)

    def __enter__(self) -> TrajectoryKeeper:
        if self._num_steps != 0:
            self._thread = OneThread("trajectories")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        written = threading.Event()
        self._thread.submit(written.set)
        self._thread.shutdown()
        self._thread = None
        is_hurried = kind is not None and not issubclass(kind, Exception)
        if not written.wait(0.0 if is_hurried else CLOSE_TIMEOUT_S):
            self._report("trajectories whose write had not finished were not stored")

    def _queue(self, write: Callable[[], None], *, what: str, num_tokens: int) -> None:
        if self._thread is None:
            return
        with self._lock:
            is_full = self._num_waiting_tokens > MAX_WAITING_TOKENS
            self._num_waiting_tokens += 0 if is_full else num_tokens
        if is_full:
            self._fail("writing takes longer than training", what)
        else:
            self._thread.submit(self._write, write, what, num_tokens)

    def _write(self, write: Callable[[], None], what: str, num_tokens: int) -> None:
        """Write in the thread. An error does not stop the training."""
        try:
            write()
            if self._num_steps is not None:
                drop_all_but_newest(self._run_dir, num_steps=self._num_steps)
        except Exception as error:  # noqa: BLE001  (counted and reported)
            self._fail(describe_error(error), what)
        finally:
            with self._lock:
                self._num_waiting_tokens -= num_tokens

    def _fail(self, why: str, what: str) -> None:
        kind = why.partition("'")[0]  # without the name of the file
        with self._lock:
            self._num_failed += 1
            is_new = kind not in self._reported
            self._reported.add(kind)
        if is_new:
            self._report(f"{what} cannot be stored: {why}; the run continues, and reports this error once")

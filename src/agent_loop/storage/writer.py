"""Writer of a step's trajectories. A file is replaced completely or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_loop.storage.arrow import pa, parquet
from agent_loop.storage.columns import Learned, StepFacts, columns_of
from agent_loop.storage.json_text import to_json
from agent_loop.storage.schema import METADATA, ROWS_PER_GROUP, SCHEMA, SCHEMA_VERSION
from agent_loop.storage.whole_file import whole_file
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

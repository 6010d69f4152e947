"""Trajectories as JSON lines, with the columns of `storage.schema`.

A line is an object with one value per column. The columns that hold JSON as text in a Parquet file hold the value
itself here, and the bytes of `extras` are in base 64.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import numpy as np

from agent_loop.errors import DataError
from agent_loop.files.plain_values import parse_json, without_halves
from agent_loop.storage.columns import JSON_COLUMNS, SCHEMA, StepFacts, columns_of, to_json
from agent_loop.storage.exclusive import whole_file
from agent_loop.storage.writer import write_rows
from agent_loop.trajectory import (
    Trajectory,
)


def write_lines(path: Path, trajectories: Iterable[Trajectory], *, split: str, step: int = 0) -> None:
    """Write one line per trajectory, all of them or none.

    Raises:
        OSError: The file cannot be written. An existing file is unchanged.
    """
    with whole_file(path) as temporary, writing_lines(temporary, split=split, step=step) as write:
        for trajectory in trajectories:
            write(trajectory)


@contextmanager
def writing_lines(path: Path, *, split: str, step: int = 0) -> Generator[Callable[[Trajectory], None]]:
    """Create or empty a file, and yield a function that appends the line of a trajectory. Each line is flushed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = StepFacts(step, split, weight_version=None, success_threshold=1.0)
    file = path.open("w", encoding="utf-8", buffering=1)

    def write(trajectory: Trajectory) -> None:
        file.write(to_line(columns_of(trajectory, facts=facts)) + "\n")

    try:
        yield write
    except BaseException:
        with suppress(OSError):  # closing fails too if a write failed, and the error of the write says more
            file.close()
        raise
    file.close()


def to_line(row: Mapping[str, Any]) -> str:
    """Return the columns of a trajectory as one line. Log-probs that are not finite become null."""
    members = (f"{json.dumps(field.name)}:{_json(field.name, row.get(field.name))}" for field in SCHEMA)
    return without_halves("{" + ",".join(members) + "}")


def stored_copy(path: Path, *, folder: Path) -> Path:
    """Write the trajectories of a file of JSON lines as a Parquet file into a folder, and return its path."""
    copy = folder / f"{path.name.partition('.')[0]}.parquet"
    write_rows(copy, list(read_lines(path)), success_threshold=1.0)
    return copy


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the columns of each trajectory, as a Parquet file holds them. A last line that was cut off is left out."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = parse_json(line)
                if not isinstance(record, dict):
                    raise ValueError("it is not an object")
                yield _row(cast(dict[str, Any], record))
            except (ValueError, TypeError, KeyError) as error:
                if not line.endswith(b"\n"):
                    return
                reason = f"it has no {error}" if isinstance(error, KeyError) else error
                raise DataError(f"{str(path)!r} line {number} holds no trajectory: {reason}") from error


def _json(name: str, value: Any) -> str:
    if name in JSON_COLUMNS:
        return "null" if value is None else str(value)
    if name == "extras" and value is not None:
        value = [{**extra, "data": base64.b64encode(extra["data"]).decode()} for extra in value]
    return to_json(value.tolist() if isinstance(value, np.ndarray) else value)


def _row(record: dict[str, Any]) -> dict[str, Any]:
    if "prompt_ids" not in record:
        raise KeyError("prompt_ids")
    row = {name: record[name] for name in SCHEMA.names if name in record}
    for name in JSON_COLUMNS & {*row}:
        row[name] = None if name == "spans" and row[name] is None else to_json(row[name])
    if row.get("extras") is not None:
        row["extras"] = [{**extra, "data": base64.b64decode(extra["data"])} for extra in row["extras"]]
    return row

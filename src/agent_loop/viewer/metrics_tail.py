"""Incremental reading of `metrics.jsonl`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from agent_loop.storage.metrics_file import metrics_of


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

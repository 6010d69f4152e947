"""`metrics.jsonl`, read on from where it was read to."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class MetricsPart:
    """Lines that the page does not have yet."""

    place: str
    """Where the next part begins; to be given back."""
    is_new: bool
    """The file was replaced: what the page has is void."""
    lines: list[dict[str, Any]]
    num_damaged: int


def read_on(path: Path, place: str = "") -> MetricsPart:
    """The lines after a place. One that is still being written is left for the next part."""
    try:
        with path.open("rb") as file:
            inode = path.stat().st_ino
            start = _offset_of(place, inode=inode, size=path.stat().st_size)
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return MetricsPart("", is_new=bool(place), lines=[], num_damaged=0)
    whole = data[: data.rfind(b"\n") + 1]
    parsed = [_parsed(line) for line in whole.splitlines() if line.strip()]
    lines = [line for line in parsed if line is not None]
    is_new = bool(place) and start == 0
    return MetricsPart(f"{inode}-{start + len(whole)}", is_new, lines, len(parsed) - len(lines))


def _offset_of(place: str, *, inode: int, size: int) -> int:
    """0 if the place is in another file, or in none."""
    before, _, offset = place.partition("-")
    fits = before == str(inode) and offset.isdecimal() and int(offset) <= size
    return int(offset) if fits else 0


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    if not isinstance(values, dict):
        return None
    metrics = cast(dict[str, Any], values)
    return metrics if isinstance(metrics.get("step"), int) else None

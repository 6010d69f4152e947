"""Rows with their locations, for errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

LocatedRow = tuple[str, Any]
"""Location of a row, such as `rows.jsonl line 3`, and the row."""


def number_rows(source: str, rows: Iterable[Any]) -> Iterator[LocatedRow]:
    """Yield rows with their locations: the source, and the number of the row, from 1."""
    for number, row in enumerate(rows, start=1):
        yield f"{source} row {number}", row

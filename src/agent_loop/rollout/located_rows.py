"""Rows that know where they are, for errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

Located = tuple[str, Any]
"""A row, behind the words that say where it is."""


def numbered(source: str, rows: Iterable[Any]) -> Iterator[Located]:
    """Yield rows with their numbers, from 1, as the words that say where they are."""
    for number, row in enumerate(rows, start=1):
        yield f"{source} row {number}", row

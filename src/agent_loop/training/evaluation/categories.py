"""Scores per category, which is the value of a column."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agent_loop.errors import DataError, did_you_mean
from agent_loop.training.evaluation.scores import RowResult, Scores, score, writable
from agent_loop.types import Row

NOTHING = "-"
"""Category of rows whose column is absent or empty."""


def categories_of(rows: Sequence[Row], *, column: str) -> list[str]:
    """Return the category of each row: its value in a column, as text.

    Args:
        rows: Rows of the data set.
        column: Name of a column, or with dots of a key inside a column, as in `extra_info.level`.

    Raises:
        DataError: No row has the column.
    """
    values = [_value(row, column) for row in rows]
    if all(value is None for value in values):
        known = sorted({str(name) for row in rows for name in row})
        raise DataError(f"no row has a column {column!r}{did_you_mean(column, known)}")
    return [_text(value) for value in values]


def score_categories(rows: Sequence[RowResult], *, categories: Sequence[str]) -> dict[str, Scores]:
    """Return the scores of each category, sorted by name.

    Args:
        rows: Results of rows, whose `group` is their index in `categories`.
        categories: Categories of the whole data set.
    """
    names = sorted({categories[row.group] for row in rows}, key=_natural)
    return {name: score([row for row in rows if categories[row.group] == name]) for name in names}


def _value(row: Mapping[str, Any], column: str) -> Any:
    if column in row:
        return row[column]
    outer, dot, rest = column.partition(".")
    inner = row.get(outer)
    return _value(cast(Mapping[str, Any], inner), rest) if dot and isinstance(inner, Mapping) else None


def _text(value: Any) -> str:
    if value is None or value == "":
        return NOTHING
    return writable(value) if isinstance(value, str) else json.dumps(value, default=str)


def _natural(name: str) -> tuple[bool, float, str]:
    """Return a sort key that sorts numbers by size, before words."""
    try:
        return False, float(name), name
    except ValueError:
        return True, 0.0, name

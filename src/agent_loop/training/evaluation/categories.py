"""Scores per category: per value of a column."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agent_loop.errors import DataError, did_you_mean
from agent_loop.training.evaluation.scores import RowResult, Scores, score, writable
from agent_loop.types import Row

NOTHING = "-"
"""The category of rows whose column is absent or empty."""


def categories_of(rows: Sequence[Row], *, column: str) -> list[str]:
    """The category of each row: its value in a column, as text.

    Args:
        rows: The data set.
        column: A column, or with dots what lies inside one, as in `extra_info.level`.

    Raises:
        DataError: No row has the column.
    """
    values = [_value(row, column) for row in rows]
    if all(value is None for value in values):
        known = sorted({str(name) for row in rows for name in row})
        raise DataError(f"no row has a column {column!r} to tell rows apart by{did_you_mean(column, known)}")
    return [_text(value) for value in values]


def score_categories(rows: Sequence[RowResult], *, categories: Sequence[str]) -> dict[str, Scores]:
    """The scores of each category, in the order of their names.

    Args:
        rows: Their `group` is their place in `categories`.
        categories: Of the whole data set.
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
    """Numbers by their size, before words."""
    try:
        return False, float(name), name
    except ValueError:
        return True, 0.0, name

"""Merge the workspace of a run's settings into rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from agent_loop.errors import DataError
from agent_loop.files.plain_values import merge_mappings, parse_json
from agent_loop.runtime.describe import describe_value

COLUMN = "workspace"


def with_workspace(row: dict[str, Any], settings: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return a row with settings merged over its column `workspace`, or with the settings as its workspace.

    Args:
        row: The row.
        settings: The settings. If there are none, the row is returned as it is.
        where: Location of the row, for errors.

    Raises:
        DataError: The column is neither a mapping nor the JSON text of one.
    """
    if not settings:
        return row
    given = row.get(COLUMN)
    if isinstance(given, str):
        try:
            given = parse_json(given)
        except ValueError as error:
            raise DataError(f"{where}: {COLUMN} is not JSON ({error}): {given[:80]!r}") from error
    if not isinstance(given, Mapping | None):
        raise DataError(f"{where}: {COLUMN} is {describe_value(given)}; give a mapping with its settings")
    return {**row, COLUMN: merge_mappings(cast(Mapping[str, Any], given or {}), settings)}

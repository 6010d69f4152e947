"""The column `workspace`: merged with the settings of the run, and the time that its check may take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from agent_loop.errors import ConfigError, DataError
from agent_loop.files.plain_values import merge_mappings, parse_json
from agent_loop.runtime.describe import describe_value
from agent_loop.runtime.numeric import as_finite_number
from agent_loop.types import Row
from agent_loop.workspaces.check import COPY_TIMEOUT_S
from agent_loop.workspaces.settings import CheckSettings, workspace_mapping

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


def check_time_s(row: Row) -> float:
    """Return how long the check of a row's workspace may take after the trajectory's deadline; 0 without a check."""
    if row.get(COLUMN) is None:
        return 0.0
    try:
        check: Any = workspace_mapping(row[COLUMN], where=COLUMN).get("check")
    except ConfigError:
        return 0.0  # the loop reports it
    if not isinstance(check, Mapping):
        return 0.0
    default: float = CheckSettings.model_fields["timeout_s"].default
    timeout_s = as_finite_number(cast(Mapping[str, Any], check).get("timeout_s", default))
    return (timeout_s or 0.0) + COPY_TIMEOUT_S

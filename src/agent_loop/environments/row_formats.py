"""Sources of rows that are neither files of rows nor functions: folders of tasks, and environments by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from agent_loop.environments.harbor.rows import harbor_rows
from agent_loop.environments.named_rows import named_rows

RowFormat = Callable[[str, Mapping[str, Any]], Iterator[tuple[str, Any]] | None]
"""Called with a source and the settings for the workspaces of its rows. Returns the rows with their locations, or None
if the source is of another format."""
ROW_FORMATS: tuple[RowFormat, ...] = (harbor_rows, named_rows)


def environment_rows(source: str, *, workspace: Mapping[str, Any]) -> Iterator[tuple[str, Any]] | None:
    """Return the rows of a source with their locations, or None if no format recognises the source.

    Args:
        source: An item of `data.train_files` or `data.val_files`.
        workspace: Settings that are merged over the workspace of every row.

    Raises:
        ConfigError: The settings are wrong.
        DataError: No row of the source can be used.
    """
    for rows_of in ROW_FORMATS:
        rows = rows_of(source, workspace)
        if rows is not None:
            return rows
    return None

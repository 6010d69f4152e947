"""Selection of loaded tools by a row."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

from agent_loop.errors import DataError, did_you_mean
from agent_loop.runtime.describe import describe_value
from agent_loop.tools.base import BaseTool


def read_selection(selection: Any, *, known: Collection[str], where: str) -> list[str] | None:
    """Return the names in a row's `tool_selection`, or None if the row has none and thereby selects all tools.

    Raises:
        DataError: The selection is not a list of names, or a name is unknown or occurs twice.
    """
    if selection is None:
        return None
    is_list = isinstance(selection, Iterable) and not isinstance(selection, (str, bytes, Mapping))
    names: list[Any] = list(cast(Iterable[Any], selection)) if is_list else []
    if not is_list or not all(isinstance(name, str) for name in names):
        raise DataError(f"{where} is {describe_value(selection)}; give a list of tool names")
    for name in names:
        if name not in known:
            raise DataError(f"{where}: there is no tool {name!r}{did_you_mean(name, known)}")
    if len(set(names)) < len(names):
        raise DataError(f"{where} is {names}; list each tool once")
    return names


def select_tools(tools: Mapping[str, BaseTool], selection: Any, *, where: str) -> Mapping[str, BaseTool]:
    """Return the tools that a row selects, in its order. Only these are shown to the model and can be called.

    Raises:
        DataError: The selection is invalid; see `read_selection`.
    """
    names = read_selection(selection, known=tools, where=where)
    return tools if names is None else {name: tools[name] for name in names}


def kwargs_of_selected(
    tools_kwargs: Mapping[str, Any] | None, *, tools: Mapping[str, BaseTool], known: Collection[str]
) -> dict[str, Any]:
    """Return a row's `tools_kwargs` without those of known tools that the row did not select.

    A table has a value of every column in every row, also for tools that the row does not use.
    """
    return {
        name: groups for name, groups in (tools_kwargs or {}).items() if name in tools or name not in known
    }


def with_row_columns(
    tools_kwargs: Mapping[str, Any], *, tools: Mapping[str, BaseTool], row: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `tools_kwargs` with the columns of the row that the tools ask for, in their `create_kwargs`.

    Values that the row gives for one tool alone take precedence over its columns.
    """
    merged = dict(tools_kwargs)
    for name, tool in tools.items():
        columns = {column: row[column] for column in tool.row_columns if row.get(column) is not None}
        if columns:
            groups: Mapping[str, Any] = merged.get(name) or {}
            merged[name] = {**groups, "create_kwargs": {**columns, **(groups.get("create_kwargs") or {})}}
    return merged

"""The tools that a row chooses among those that are loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

from agent_loop.errors import DataError, did_you_mean
from agent_loop.runtime.boundary import describe_value
from agent_loop.tools.base import BaseTool


def read_selection(selection: Any, *, known: Collection[str], where: str) -> list[str] | None:
    """The names in a row's `tool_selection`; None where it has none, which chooses all.

    Raises:
        DataError: It is no list of names, or one is of no tool, or twice in it.
    """
    if selection is None:
        return None
    is_list = isinstance(selection, Iterable) and not isinstance(selection, (str, bytes, Mapping))
    names: list[Any] = list(cast(Iterable[Any], selection)) if is_list else []
    if not is_list or not all(isinstance(name, str) for name in names):
        raise DataError(f"{where} is {describe_value(selection)}; give a list of names of tools")
    for name in names:
        if name not in known:
            raise DataError(f"{where}: there is no tool {name!r}{did_you_mean(name, known)}")
    if len(set(names)) < len(names):
        raise DataError(f"{where} is {names}; name each tool once")
    return names


def select_tools(tools: Mapping[str, BaseTool], selection: Any, *, where: str) -> Mapping[str, BaseTool]:
    """The tools that a row chooses, in its order: only these are shown to the model, and only these can be called.

    Raises:
        DataError: As `read_selection`.
    """
    names = read_selection(selection, known=tools, where=where)
    return tools if names is None else {name: tools[name] for name in names}


def kwargs_of_selected(
    tools_kwargs: Mapping[str, Any] | None, *, tools: Mapping[str, BaseTool], known: Collection[str]
) -> dict[str, Any]:
    """A row's `tools_kwargs` without those of tools that exist but were not chosen: a table has them in every row."""
    return {
        name: groups for name, groups in (tools_kwargs or {}).items() if name in tools or name not in known
    }

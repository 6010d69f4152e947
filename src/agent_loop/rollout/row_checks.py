"""Check that the loops, tools and interactions that rows name exist."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from agent_loop.environments.factory import find_environment
from agent_loop.errors import DataError, did_you_mean
from agent_loop.interactions.registry import read_interaction_name
from agent_loop.loops import ToolAgentLoop
from agent_loop.loops.base import AgentLoopBase, LoopContext
from agent_loop.loops.environment_agent import EnvironmentAgentLoop
from agent_loop.loops.registry import LoopRegistry
from agent_loop.rollout.rows import refuse_bad_columns
from agent_loop.tools.registry import read_selection
from agent_loop.types import Row


def check_rows(
    rows: Iterable[Row], context: LoopContext, *, loops: LoopRegistry, default_agent_loop: str
) -> None:
    """Check all rows of a run."""
    for number, row in enumerate(rows):
        where = f"row {number}"
        if "raw_prompt" not in row:
            raise DataError(f"{where} has no raw_prompt; its columns are {', '.join(sorted(row))}")
        refuse_bad_columns(row, where=where)
        entry = loops.get(str(row.get("agent_name") or default_agent_loop), where=f"{where}: agent_name")
        entry.loop_class.check_row(row, entry.kwargs, where=where)
        if kwargs := row.get("tools_kwargs"):
            _refuse_unknown(kwargs, context.tools, f"{where}: tools_kwargs")
        known_tools = _known_tools(row, entry.loop_class, context, where=where)
        if "tool_selection" in row and known_tools is not None:
            read_selection(row["tool_selection"], known=known_tools, where=f"{where}: tool_selection")
        interaction_kwargs: Mapping[str, Any] = row.get("interaction_kwargs") or {}
        if issubclass(entry.loop_class, ToolAgentLoop) or interaction_kwargs.get("name") is not None:
            where = f"{where}: interaction_kwargs"
            read_interaction_name(interaction_kwargs, known=context.interactions, where=where)


def _known_tools(
    row: Row, loop_class: type[AgentLoopBase], context: LoopContext, *, where: str
) -> Collection[str] | None:
    """Return the names of a row's tools, or None if they are known only after the reset of its environment."""
    if not issubclass(loop_class, EnvironmentAgentLoop):
        return context.tools
    try:
        factory = find_environment(row.get("environment"), known=context.environments)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    return None if factory.tool_names is None else {*context.tools, *factory.tool_names}


def _refuse_unknown(names: Iterable[str], known: Collection[str], where: str) -> None:
    for name in names:
        if name not in known:
            raise DataError(f"{where}: there is no {name!r}{did_you_mean(name, known)}")

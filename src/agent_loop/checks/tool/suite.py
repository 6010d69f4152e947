"""Run the conformance checks on a tool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from agent_loop.checks.tool.checked_tool import CheckedTool
from agent_loop.checks.tool.contract import TOOL_CHECKS
from agent_loop.errors import ConfigError
from agent_loop.testing.conformance import CheckReport, OnResult
from agent_loop.tools.base import BaseTool


async def check_tool(
    tool: BaseTool,
    *,
    calls: Sequence[Mapping[str, Any]],
    create_kwargs: Mapping[str, Any] | None = None,
    execute_kwargs: Mapping[str, Any] | None = None,
    timeout_s: float = 60.0,
    on_result: OnResult | None = None,
) -> CheckReport:
    """Check that a tool follows the contract of `BaseTool`.

    The tool is really called, about a hundred times, with unusual arguments among them. Point a tool with side effects
    at something that they cannot harm.

    Args:
        calls: Arguments of calls that succeed. Give several with different results if possible.
        create_kwargs: Arguments of `create`, as in a row's `tools_kwargs[name]["create_kwargs"]`.
        execute_kwargs: Arguments of `execute`, as in a row's `tools_kwargs[name]["execute_kwargs"]`.
        timeout_s: Time limit of each check.
        on_result: Called with each result as soon as it is known.

    Raises:
        ConfigError: `calls` is empty.
    """
    if not calls:
        raise ConfigError("check_tool needs the arguments of at least one call")
    subject = CheckedTool(tool, calls, create_kwargs or {}, execute_kwargs or {}, _numbers=count())
    return await TOOL_CHECKS.run(
        subject, name=f"tool {tool.name!r}", timeout_s=timeout_s, on_result=on_result
    )

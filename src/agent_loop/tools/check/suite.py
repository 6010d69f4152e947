"""Runs the checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

from agent_loop.errors import ConfigError
from agent_loop.testing.checks import CheckReport, CheckResult, run_checks
from agent_loop.tools.base import BaseTool
from agent_loop.tools.check.contract import CHECKS
from agent_loop.tools.check.subject import Subject


async def check_tool(
    tool: BaseTool,
    *,
    calls: Sequence[Mapping[str, Any]],
    create_kwargs: Mapping[str, Any] | None = None,
    execute_kwargs: Mapping[str, Any] | None = None,
    timeout_s: float = 60.0,
    on_result: Callable[[CheckResult], None] | None = None,
) -> CheckReport:
    """Holds a tool against the contract of `BaseTool`.

    Every call is run for real, a hundred or so in all, some with odd arguments: give a tool with effects a place where
    they do no harm.

    Args:
        calls: Arguments of calls that work, best of several that are answered differently.
        create_kwargs: A row's `tools_kwargs[name]["create_kwargs"]`.
        execute_kwargs: A row's `tools_kwargs[name]["execute_kwargs"]`.
        timeout_s: Of each check. One that takes longer has failed.
        on_result: Told of each result as it comes.

    Raises:
        ConfigError: There are no calls.
    """
    if not calls:
        raise ConfigError("check_tool needs the arguments of at least one call")
    subject = Subject(tool, calls, create_kwargs or {}, execute_kwargs or {}, _numbers=count())
    checks = {name: partial(check, subject) for name, check in CHECKS.items()}
    results = await run_checks(checks, timeout_s=timeout_s, on_result=on_result)
    return CheckReport(f"tool {tool.name!r}", results)

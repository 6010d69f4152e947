"""Concurrency limit and retries of the calls of one tool, across all trajectories of the process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from agent_loop.errors import ToolUnavailable
from agent_loop.tools.base import BaseTool

ResultT = TypeVar("ResultT")

RETRY_DELAY_S = 0.25
"""Delay before the first retry; doubled before each further retry."""


async def limit_concurrency(tool: BaseTool, run: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Run a call when fewer than `max_concurrent` calls of the tool are running on this event loop."""
    semaphores = _SEMAPHORES.setdefault(asyncio.get_running_loop(), WeakKeyDictionary())
    if tool not in semaphores:
        semaphores[tool] = asyncio.Semaphore(tool.max_concurrent or 1)
    async with semaphores[tool]:
        return await run()


async def with_retries(tool: BaseTool, run: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Run a call, and retry it up to `tool.retries` times when it raises `ToolUnavailable`.

    Raises:
        ToolUnavailable: Every attempt raised it.
    """
    for attempt in range(tool.retries):
        try:
            return await run()
        except ToolUnavailable:
            await asyncio.sleep(RETRY_DELAY_S * 2**attempt)
    try:
        return await run()
    except ToolUnavailable as error:
        raise ToolUnavailable(f"{error} (tried {tool.retries + 1} times)") from error


_SEMAPHORES: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakKeyDictionary[Any, asyncio.Semaphore]] = (
    WeakKeyDictionary()
)

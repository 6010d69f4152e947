"""How the calls of one tool are run, whichever trajectories make them: so many at once, some of them again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from agent_loop.errors import ToolUnavailable
from agent_loop.tools.base import BaseTool

ResultT = TypeVar("ResultT")

RETRY_DELAY_S = 0.25
"""Before the first retry; twice as long before each further one."""


async def in_turn(tool: BaseTool, run: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Runs a call once fewer than `max_concurrent` calls of the tool run on this event loop."""
    places = _PLACES.setdefault(asyncio.get_running_loop(), WeakKeyDictionary())
    if tool not in places:
        places[tool] = asyncio.Semaphore(tool.max_concurrent or 1)
    async with places[tool]:
        return await run()


async def with_retries(tool: BaseTool, run: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Runs a call, and again as often as the tool allows where it was unavailable.

    Raises:
        ToolUnavailable: It was so each time.
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


_PLACES: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakKeyDictionary[Any, asyncio.Semaphore]] = (
    WeakKeyDictionary()
)

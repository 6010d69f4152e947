"""How the calls of one tool are run, whichever trajectories make them: so many at once, some of them again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from agent_loop.boundary import OnReplay
from agent_loop.errors import ConfigError, ToolUnavailable
from agent_loop.tools.base import BaseTool

ResultT = TypeVar("ResultT")

RETRY_DELAY_S = 0.25
"""Before the first retry; twice as long before each further one."""


def check_declarations(tool: BaseTool) -> None:
    """Checks what a tool declares of its calls.

    Raises:
        ConfigError: A limit is out of range, or calls that may not be run twice are to be retried.
    """
    on_replay = OnReplay(tool.on_replay)
    if tool.timeout_s is not None and not tool.timeout_s > 0:
        raise ConfigError(f"timeout_s of tool {tool.name!r} is {tool.timeout_s}; give seconds, or None")
    if tool.max_concurrent is not None and tool.max_concurrent < 1:
        raise ConfigError(
            f"max_concurrent of tool {tool.name!r} is {tool.max_concurrent}; give at least 1, or None"
        )
    if tool.retries < 0:
        raise ConfigError(f"retries of tool {tool.name!r} is {tool.retries}; give 0 or more")
    if tool.retries and on_replay is not OnReplay.RECORDED:
        raise ConfigError(
            f"tool {tool.name!r} has retries={tool.retries} but on_replay={str(on_replay)!r}: a call that seems to "
            "have failed may have had its effect; set retries to 0, or on_replay to 'recorded' if a second run does no "
            "harm"
        )


def place_for_call(tool: BaseTool) -> AbstractAsyncContextManager[None]:
    """Waits until fewer than `max_concurrent` calls of the tool run on this event loop."""
    if tool.max_concurrent is None:
        return _NO_LIMIT
    places = _PLACES.setdefault(asyncio.get_running_loop(), WeakKeyDictionary())
    if tool not in places:
        places[tool] = asyncio.Semaphore(tool.max_concurrent)
    return places[tool]


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


_NO_LIMIT = nullcontext()
_PLACES: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakKeyDictionary[Any, asyncio.Semaphore]] = (
    WeakKeyDictionary()
)

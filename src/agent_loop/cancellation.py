"""The shared event that asks trajectories to stop where they are, so that they can go on later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from agent_loop.boundary import OnReplay
from agent_loop.concurrency import run_while

ResultT = TypeVar("ResultT")

FINISH_GRACE_S = 10.0
"""How long a call that may be run only once gets to end, once its trajectory is cancelled."""


class Cut(Exception):
    """The trajectory was cancelled before this began, or while it ran; nothing came of it."""


class Cancellation:
    """What is in flight in one trajectory, against the event that cancels it.

    Args:
        event: Shared by all trajectories that are cancelled together; None never comes.
    """

    def __init__(self, event: asyncio.Event | None) -> None:
        self._event = event

    async def run(
        self,
        function: Callable[[], Coroutine[Any, Any, ResultT]],
        *,
        grace_s: float,
        ask: Callable[[], Awaitable[object]] | None = None,
    ) -> ResultT:
        """The function's result.

        Args:
            grace_s: How long it may go on after the event.
            ask: Awaited in that time: has the function end by itself.

        Raises:
            Cut: The event was set before, or the function did not end in time.
        """
        event = self._event
        if event is None:
            return await function()
        if event.is_set():
            raise Cut

        async def over() -> None:
            await event.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    if ask is not None:
                        await ask()
                    await asyncio.Event().wait()

        result = await run_while(function(), condition=over())
        if result is None:
            raise Cut
        return result

    async def call(
        self, function: Callable[[], Coroutine[Any, Any, ResultT]], *, on_replay: OnReplay
    ) -> ResultT:
        """What a tool or an interaction gives. A call that may be run only once gets `FINISH_GRACE_S` to end; any
        other is cut at once, since it is run again later.

        Raises:
            Cut: As `run`.
        """
        return await self.run(function, grace_s=FINISH_GRACE_S if on_replay is OnReplay.ONCE else 0.0)

"""Cancellation of running trajectories by a shared event. Cancelled trajectories can be resumed later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from agent_loop.runtime.concurrency import CallAborted, running_in_background
from agent_loop.runtime.instances import OnReplay

ResultT = TypeVar("ResultT")

FINISH_GRACE_S = 10.0
"""Seconds that a call that may run only once has to end after its trajectory is cancelled."""


class Cancellation:
    """Cancellation of the calls of one trajectory by a shared event.

    Args:
        event: Event that cancels all trajectories that share it. With None, the trajectory is never cancelled.
    """

    def __init__(self, event: asyncio.Event | None) -> None:
        self.event = event

    async def call(
        self, function: Callable[[], Coroutine[Any, Any, ResultT]], *, on_replay: OnReplay
    ) -> ResultT:
        """Call a tool or an interaction and return its result. The call is cancelled when the event is set.

        A call that may run only once has `FINISH_GRACE_S` to end. Other calls are cancelled immediately, because they
        are repeated on resume.

        Raises:
            CallAborted: The event was already set, or the call did not end in time.
        """
        event = self.event
        if event is None:
            return await function()
        if event.is_set():
            raise CallAborted
        grace_s = FINISH_GRACE_S if on_replay is OnReplay.ONCE else 0.0
        scope = asyncio.timeout(None)

        async def limit() -> None:
            await event.wait()
            scope.reschedule(asyncio.get_running_loop().time() + grace_s)

        try:
            async with scope, running_in_background(limit()):
                return await function()
        except TimeoutError:
            if scope.expired():
                raise CallAborted from None
            raise

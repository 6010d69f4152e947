"""The shared event that asks trajectories to stop where they are, so that they can go on later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from agent_loop.runtime.concurrency import CallAborted, Signal
from agent_loop.runtime.instances import OnReplay
from agent_loop.runtime.time_scope import TimeScope

ResultT = TypeVar("ResultT")

FINISH_GRACE_S = 10.0
"""How long a call that may be run only once gets to end, once its trajectory is cancelled."""


class Cancellation:
    """What is in flight in one trajectory, against the event that cancels it.

    Args:
        event: Shared by all trajectories that are cancelled together; None never comes.
    """

    def __init__(self, event: asyncio.Event | None) -> None:
        self.signal = None if event is None else Signal(event)
        """Callbacks for the event."""

    async def call(
        self, function: Callable[[], Coroutine[Any, Any, ResultT]], *, on_replay: OnReplay
    ) -> ResultT:
        """What a tool or an interaction gives. A call that may be run only once gets `FINISH_GRACE_S` to end; any
        other is cut at once, since it is run again later.

        Raises:
            CallAborted: The event was set before, or the function did not end in time.
        """
        signal = self.signal
        if signal is None:
            return await function()
        if signal.is_set():
            raise CallAborted
        grace_s = FINISH_GRACE_S if on_replay is OnReplay.ONCE else 0.0
        scope = TimeScope()
        try:
            with scope:
                callback = signal.add_callback(lambda: scope.end_in(grace_s))
                try:
                    return await function()
                finally:
                    signal.remove_callback(callback)
        except TimeoutError:
            if scope.has_expired:
                raise CallAborted from None
            raise

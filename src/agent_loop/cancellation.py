"""The shared event that asks trajectories to stop where they are, so that they can go on later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from agent_loop.boundary import OnReplay
from agent_loop.concurrency import Cut, Signal, run_abortable
from agent_loop.time_scope import TimeScope

ResultT = TypeVar("ResultT")

FINISH_GRACE_S = 10.0
"""How long a call that may be run only once gets to end, once its trajectory is cancelled."""


class Cancellation:
    """What is in flight in one trajectory, against the event that cancels it.

    Args:
        event: Shared by all trajectories that are cancelled together; None never comes.
    """

    def __init__(self, event: asyncio.Event | None) -> None:
        self._signal = None if event is None else Signal.of(event)

    def run_abortable(
        self,
        function: Callable[[], Coroutine[Any, Any, ResultT]],
        *,
        abort: Callable[[], Awaitable[None]],
        keep_partial: Callable[[ResultT], object],
        grace_s: float,
    ) -> Awaitable[ResultT]:
        """The result of a function that `abort` has end by itself, when the event comes or the caller is cancelled.

        Args:
            keep_partial: Given the result if the caller is cancelled.
            grace_s: How long it may go on after that.

        Raises, when it is awaited:
            Cut: The event was set before, or the function did not end in time.
        """
        return run_abortable(
            function, abort=abort, keep_partial=keep_partial, grace_s=grace_s, signal=self._signal
        )

    async def call(
        self, function: Callable[[], Coroutine[Any, Any, ResultT]], *, on_replay: OnReplay
    ) -> ResultT:
        """What a tool or an interaction gives. A call that may be run only once gets `FINISH_GRACE_S` to end; any
        other is cut at once, since it is run again later.

        Raises:
            Cut: The event was set before, or the function did not end in time.
        """
        signal = self._signal
        if signal is None:
            return await function()
        if signal.is_set():
            raise Cut
        grace_s = FINISH_GRACE_S if on_replay is OnReplay.ONCE else 0.0
        scope = TimeScope()
        try:
            with scope:
                listener = signal.listen(lambda: scope.end_in(grace_s))
                try:
                    return await function()
                finally:
                    signal.leave(listener)
        except TimeoutError:
            if scope.has_expired:
                raise Cut from None
            raise

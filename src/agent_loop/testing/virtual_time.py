"""Virtual time for tests of loops, tools and servers."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from agent_loop.runtime.event_loop import run_to_end

ResultT = TypeVar("ResultT")


def run_virtual(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a coroutine like `asyncio.run`, in virtual time.

    The clock jumps to the next timer whenever every task sleeps. `asyncio.sleep`, timeouts and `loop.time()` follow
    this clock, so an hour of sleep takes no time and the order of events is always the same. Threads and sockets still
    take real time.

    Raises:
        RuntimeError: Every task waits for something that can never happen.
    """
    return run_to_end(main, loop_factory=_VirtualClockLoop)


class _VirtualClockLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now = 0.0
        self._thread_ends: dict[asyncio.Future[Any], float] = {}
        """Real time until which each running thread stops the virtual clock."""
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        future = super().run_in_executor(executor, func, *args)
        self._thread_ends[future] = time.monotonic() + REAL_WAIT_S
        future.add_done_callback(self._thread_ends.pop)
        return future

    def jump(self, seconds: float) -> None:
        self._now += seconds

    @property
    def waits_for_threads(self) -> bool:
        return bool(self._thread_ends)

    @property
    def held_s(self) -> float:
        """Seconds of real time for which running threads still stop the virtual clock."""
        return max(0.0, max(self._thread_ends.values()) - time.monotonic())


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: _VirtualClockLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if self._loop.waits_for_threads:
            ready = super().select(None if timeout is None else self._loop.held_s)
            if ready or timeout is None:
                return ready
        elif timeout is None:
            raise RuntimeError("every task waits for something that can never happen in virtual time")
        self._loop.jump(timeout)
        return ready


REAL_WAIT_S = 1.0
"""Seconds for which a running thread stops the virtual clock. Timers then fire before a thread that takes longer."""

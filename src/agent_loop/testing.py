"""For tests of loops, tools and servers: a clock that jumps."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


def run_virtual(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Like `asyncio.run`, in virtual time: whenever every task sleeps, the clock jumps to the next one due.

    `asyncio.sleep`, timeouts and `loop.time()` follow that clock, so an hour of waiting takes no time and the order
    of events is always the same. Threads and sockets are waited for in real time.

    Raises:
        RuntimeError: Every task waits for something that can never happen.
    """
    with asyncio.Runner(loop_factory=_VirtualClockLoop) as runner:
        return runner.run(main)


class _VirtualClockLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now = 0.0
        self._threads = 0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        future = super().run_in_executor(executor, func, *args)
        self._threads += 1
        future.add_done_callback(self._thread_done)
        return future

    async def shutdown_default_executor(self, *timeout: Any) -> None:
        self._threads += 1
        try:
            await super().shutdown_default_executor(*timeout)
        finally:
            self._threads -= 1

    def jump(self, seconds: float) -> None:
        self._now += seconds

    @property
    def waits_for_threads(self) -> bool:
        return self._threads > 0

    def _thread_done(self, _: asyncio.Future[Any]) -> None:
        self._threads -= 1


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: _VirtualClockLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if self._loop.waits_for_threads:
            ready = super().select(REAL_WAIT_S)
            if ready or timeout is None:
                return ready
        elif timeout is None:
            raise RuntimeError("every task waits for something that can never happen in virtual time")
        self._loop.jump(timeout)
        return ready


REAL_WAIT_S = 0.05
"""How long a running thread holds the clock before a timer may overtake it."""

"""Time limit on what a `with` block awaits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self


class TimeScope:
    """Time limit on the body of a plain `with` block: `asyncio.timeout_at` without its coroutines. Single use.

    When the limit passes, the task that entered the scope is cancelled, and leaving the scope raises TimeoutError
    unless other code cancelled the task as well. `docs/performance.md` says what the scope saves.

    Args:
        ends_at: End on the event loop's clock.
        timeout_s: Seconds from entering the scope to its end. At most one of the two is given; without them there is no
            limit until `move` sets one.
    """

    __slots__ = ("_ends_at", "_loop", "_num_cancellations", "_task", "_timeout_s", "_timer", "has_expired")

    def __init__(self, ends_at: float | None = None, *, timeout_s: float | None = None) -> None:
        self.has_expired = False
        self._ends_at = ends_at
        self._timeout_s = timeout_s
        self._task: asyncio.Task[object] | None = None
        self._timer: asyncio.Handle | None = None
        self._num_cancellations = 0
        self._loop: asyncio.AbstractEventLoop

    def __enter__(self) -> Self:
        loop = self._loop = asyncio.get_running_loop()
        task = self._task = asyncio.current_task(loop)
        if task is None:
            raise RuntimeError("a time scope was entered outside of a task")
        self._num_cancellations = task.cancelling()
        if self._timeout_s is not None:
            self._ends_at = loop.time() + self._timeout_s
        if self._ends_at is not None:
            self._set_timer(self._ends_at)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        self._stop_timer()
        if self.has_expired and task is not None:
            is_alone = task.uncancel() <= self._num_cancellations
            if is_alone and kind is asyncio.CancelledError:
                raise TimeoutError from error

    def move(self, ends_at: float | None) -> None:
        """Set another end. Does nothing if the scope has expired or is not entered."""
        self._ends_at = ends_at
        if self._task is None or self.has_expired:
            return
        self._stop_timer()
        if ends_at is not None:
            self._set_timer(ends_at)

    def end_in(self, seconds: float) -> None:
        """Set the end to `seconds` from now. Does nothing if `move` does nothing."""
        if self._task is not None:
            self.move(self._loop.time() + seconds)

    def _set_timer(self, ends_at: float) -> None:
        loop = self._loop
        if ends_at <= loop.time():
            self._timer = loop.call_soon(self._expire)
        else:
            self._timer = loop.call_at(ends_at, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        if self._task is not None:
            self.has_expired = True
            self._task.cancel()


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """Return the clock of a loop: `time.monotonic` for asyncio's own loops, which saves one call, or `loop.time`."""
    return time.monotonic if type(loop).time is asyncio.BaseEventLoop.time else loop.time

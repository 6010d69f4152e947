"""Time limit on what a `with` block awaits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self


class TimeScope:
    """Time limit on the body of a plain `with` block. Faster than `asyncio.timeout_at`, which awaits. Single use.

    When the limit passes, the task that entered the scope is cancelled. Leaving the scope then raises TimeoutError,
    unless other code cancelled the task as well. See `docs/performance.md` for the time that the scope saves.

    Args:
        ends_at: End on the event loop's clock. Without `ends_at` and `timeout_s`, there is no limit until `move` sets
            one.
        timeout_s: Seconds from entering the scope to its end. Replaces `ends_at`.
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
            raise RuntimeError(
                "a time scope was entered outside of an asyncio task; enter it in a coroutine of a task"
            )
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
        """Set another end; None removes the limit. Has no effect after the scope has expired."""
        self._ends_at = ends_at
        if self._task is None or self.has_expired:
            return
        self._stop_timer()
        if ends_at is not None:
            self._set_timer(ends_at)

    def end_in(self, seconds: float) -> None:
        """Set the end to `seconds` from now. Does nothing if the scope is not entered or has expired."""
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
    """Return the clock of an event loop: `time.monotonic` for asyncio's own loops, `loop.time` otherwise.

    `time.monotonic` saves one Python call.
    """
    return time.monotonic if type(loop).time is asyncio.BaseEventLoop.time else loop.time

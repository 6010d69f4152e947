"""A time limit on what a `with` block awaits."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from types import TracebackType
from typing import Self


class TimeScope:
    """As `asyncio.timeout_at`, for a plain `with` and in a fraction of the time: a trajectory enters several in each of
    its turns. Single use.

    Once its time has passed, the task in which it was entered is cancelled; leaving it then raises TimeoutError, unless
    somebody else cancelled the task too.
    """

    __slots__ = (
        "_alarms",
        "_ends_at",
        "_num_cancellations",
        "_task",
        "_timeout_s",
        "alarm_at",
        "has_expired",
    )

    def __init__(self, ends_at: float | None = None, *, timeout_s: float | None = None) -> None:
        """At most one of the two is given; without them there is no limit, until `move` sets one.

        Args:
            ends_at: In the event loop's time.
            timeout_s: Has it end so many seconds after it was entered.
        """
        self.has_expired = False
        self.alarm_at: float | None = None
        """When it is to be looked at; never later than its end."""
        self._ends_at = ends_at
        self._timeout_s = timeout_s
        self._task: asyncio.Task[object] | None = None
        self._num_cancellations = 0
        self._alarms: _Alarms

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()  # (once: it asks the system for the process each time)
        task = self._task = asyncio.current_task(loop)
        if task is None:
            raise RuntimeError("a time scope was entered outside of a task")
        self._num_cancellations = task.cancelling()
        alarms = _HERE.alarms
        if alarms is None or alarms.loop is not loop:
            alarms = _HERE.alarms = _Alarms(loop)
        self._alarms = alarms
        if self._timeout_s is not None:
            self._ends_at = alarms.clock() + self._timeout_s
        if self._ends_at is not None:
            alarms.set(self, self._ends_at)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self.alarm_at is not None:
            self._alarms.forget(self)
        if self.has_expired and task is not None:
            is_alone = task.uncancel() <= self._num_cancellations
            if is_alone and kind is asyncio.CancelledError:
                raise TimeoutError from error

    def move(self, ends_at: float | None) -> None:
        """Ends it at another time; does nothing where it has expired, or is not entered."""
        self._ends_at = ends_at
        if ends_at is None or self._task is None or self.has_expired:
            return
        # An alarm that comes too early is left to: it costs less to look again than to set another one.
        if self.alarm_at is None or self.alarm_at > ends_at:
            self._alarms.set(self, ends_at)

    def end_in(self, seconds: float) -> None:
        """Ends it so many seconds from here; does nothing where `move` does nothing."""
        if self._task is not None:
            self.move(self._alarms.clock() + seconds)

    def look(self, at: float) -> None:
        """Of the alarms: it is so late."""
        if self._task is None or self._ends_at is None:
            return
        if at < self._ends_at:
            self._alarms.set(self, self._ends_at)
        else:
            self.has_expired = True
            self._task.cancel()


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """What tells the time of a loop: its `time`, or what that asks where it is asyncio's own; the time is asked for
    dozens of times in each trajectory."""
    return time.monotonic if type(loop).time is asyncio.BaseEventLoop.time else loop.time


FAR_S = 1.0
"""Scopes that end later are looked through no more often than that."""


class _Alarms:
    """When the scopes of one event loop are to be looked at, behind a single timer. Nearly all are left long before
    their end: those are put into a dict and taken out of it, and no more is done for them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.clock = clock_of(loop)
        self._far: dict[TimeScope, None] = {}
        """To be looked at from `_scan_at` on."""
        self._scan_at = math.inf
        self._near: list[tuple[float, int, TimeScope]] = []
        """A heap of the others; entries whose scope has another time by now are dead."""
        self._num_near = 0
        """Those that are not dead."""
        self._numbers = count()
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = math.inf

    def set(self, scope: TimeScope, at: float) -> None:
        """Has the scope looked at then, and not at the time that was set before."""
        if scope.alarm_at is not None:
            self.forget(scope)
        scope.alarm_at = at
        if at >= self._scan_at:
            self._far[scope] = None
        elif at >= self.clock() + FAR_S:
            self._far[scope], self._scan_at = None, at
            self._wake_in_time()
        else:
            self._bring_near(scope, at)
            self._wake_in_time()

    def forget(self, scope: TimeScope) -> None:
        """It need not be looked at."""
        scope.alarm_at = None
        if scope in self._far:
            del self._far[scope]
        else:
            self._num_near -= 1
        if not self._far and not self._num_near:
            self._near.clear()
            self._scan_at = math.inf
            self._sleep()

    def _bring_near(self, scope: TimeScope, at: float) -> None:
        heappush(self._near, (at, next(self._numbers), scope))
        self._num_near += 1

    def _look(self) -> None:
        """Looks at all scopes whose time has come."""
        now = max(self._wakes_at, self.clock())
        self._sleep()
        if now >= self._scan_at:
            self._look_far(until=now + FAR_S)
        while self._near and (self._near[0][0] <= now or self._near[0][2].alarm_at != self._near[0][0]):
            at, _, scope = heappop(self._near)
            if scope.alarm_at == at:
                self.forget(scope)
                scope.look(at)
        self._wake_in_time()

    def _look_far(self, *, until: float) -> None:
        """Brings those near that are to be looked at before then."""
        times = {scope: scope.alarm_at or 0.0 for scope in self._far}
        for scope, at in times.items():
            if at < until:
                del self._far[scope]
                self._bring_near(scope, at)
        self._scan_at = min((times[scope] for scope in self._far), default=math.inf)

    def _wake_in_time(self) -> None:
        """Has the timer fire no later than the first is to be looked at."""
        first = min(self._scan_at, self._near[0][0] if self._near else math.inf)
        if first < self._wakes_at:
            self._sleep()
            self._wakes_at = first
            self._timer = self.loop.call_at(first, self._look)

    def _sleep(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._wakes_at = None, math.inf


class _Here(threading.local):
    """Of the event loop that ran last in this thread. Scopes of an earlier one keep the alarms that they have."""

    alarms: _Alarms | None = None


_HERE = _Here()

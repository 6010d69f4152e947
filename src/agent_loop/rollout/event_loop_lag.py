"""How late the event loop is, and what held it up."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from agent_loop.runtime.activity import Board

logger = logging.getLogger(__name__)

TICK_S = 0.05
"""How often the loop is looked at; what holds it up for less is seen in part."""
LATE_S = 0.1
WARN_S = 1.0
REMEDY = (
    "everything else waits meanwhile; blocking code in an async tool, reward or loop does this: await it, or make the "
    "function a plain one, which runs in a thread"
)


@dataclass(frozen=True, slots=True)
class LoopLag:
    """How late timers were, since the measuring began."""

    max_s: float = 0.0
    mean_s: float = 0.0
    late_share: float = 0.0
    """Of the time, in which the loop was held up for more than `LATE_S` at once."""


class LagMonitor:
    """Measures while `measuring` is open, and warns of what holds the loop up for more than `WARN_S`.

    Of a block it warns while it lasts, from a thread, with the line of code that it is at; of the first, and after
    that of each that lasts twice as long as the one before. A machine that is too busy to let this process run holds
    its loop up too; that is measured, but nothing that a user's code could mend, and not warned of.
    """

    def __init__(self, board: Board, *, warn_s: float = WARN_S) -> None:
        self._board = board
        self._warn_s = warn_s
        self._limit_s = warn_s
        self._num_open = 0
        self._timer: asyncio.TimerHandle | None = None
        self._started = 0.0
        self._num_ticks = 0
        self._sum_s = self._max_s = self._late_s = 0.0
        self._beat_at = 0.0
        """When the loop last was alive, by the machine's clock."""
        self._cpu_at = 0.0
        """What this process had computed by then, in seconds."""

    @property
    def lag(self) -> LoopLag:
        """So far."""
        if not self._num_ticks or self._max_s == 0.0:
            return LoopLag()
        elapsed_s = asyncio.get_running_loop().time() - self._started
        return LoopLag(self._max_s, self._sum_s / self._num_ticks, self._late_s / max(elapsed_s, TICK_S))

    @contextmanager
    def measuring(self) -> Generator[None]:
        """May be open more than once at a time."""
        self._num_open += 1
        if self._num_open == 1:
            self._begin()
        try:
            yield
        finally:
            self._num_open -= 1
            if not self._num_open and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._started, self._beat_at, self._cpu_at = loop.time(), time.monotonic(), time.process_time()
        self._num_ticks, self._limit_s = 0, self._warn_s
        self._sum_s = self._max_s = self._late_s = 0.0
        self._timer = loop.call_later(TICK_S, self._tick, loop, loop.time() + TICK_S)
        watch = threading.Thread(
            target=self._watch, args=(loop, threading.get_ident(), self._started), daemon=True
        )
        watch.start()

    def _tick(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        now = loop.time()
        lag_s = max(now - due, 0.0)
        passed_s, computed_s = time.monotonic() - self._beat_at, time.process_time() - self._cpu_at
        self._beat_at, self._cpu_at = time.monotonic(), time.process_time()
        self._num_ticks += 1
        self._sum_s += lag_s
        self._max_s = max(self._max_s, lag_s)
        self._late_s += lag_s if lag_s > LATE_S else 0.0
        was_starved = computed_s < passed_s / 2
        if lag_s > self._limit_s and not (was_starved and passed_s > lag_s / 2):
            # The thread did not see it: it had no chance to run, or time is virtual.
            self._warn(lag_s, f"the last event before was: {self._board.last_event}")
        self._timer = loop.call_later(TICK_S, self._tick, loop, now + TICK_S)

    def _watch(self, loop: asyncio.AbstractEventLoop, thread_id: int, started: float) -> None:
        """Runs in a thread of its own, as long as the measuring that it was started for."""
        while self._num_open and self._started == started:
            time.sleep(self._warn_s / 4)
            blocked_s = time.monotonic() - self._beat_at - TICK_S
            if blocked_s > self._limit_s and loop.is_running():
                frame = sys._current_frames().get(thread_id)  # pyright: ignore[reportPrivateUsage]  (documented)
                if frame is None or frame.f_globals.get("__name__") != "selectors":
                    self._warn(blocked_s, self._culprit(loop, frame))

    def _culprit(self, loop: asyncio.AbstractEventLoop, frame: FrameType | None) -> str:
        whose = self._board.activity_of(asyncio.current_task(loop))
        stack = "".join(traceback.format_stack(frame)[-3:]) if frame is not None else "unknown\n"
        return f"{f'by {whose}, ' if whose else ''}at\n{stack.rstrip()}"

    def _warn(self, lag_s: float, culprit: str) -> None:
        self._limit_s = 2 * lag_s
        logger.warning("the event loop was held up for %.1f s, %s\n%s", lag_s, culprit, REMEDY)

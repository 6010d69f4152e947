"""Lag of the event loop, and warnings about the code that blocks it."""

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

from agent_loop.runtime.activity import ActivityMonitor, WaitKind, waiting_for

logger = logging.getLogger(__name__)

TICK_S = 0.05
"""Seconds between two measurements. Shorter blocks are measured in part."""
LATE_S = 0.1
WARN_S = 1.0
REMEDY = (
    "all other trajectories wait while it is blocked; blocking code in an async tool, reward or loop is the usual "
    "cause: await it, or define the function with def, so that it runs in a thread"
)
ENCODING_REMEDY = (
    "all other trajectories wait while agent_loop renders and encodes messages; no tool, reward or loop is the cause: "
    "use a fast tokenizer or shorter prompts, or raise rollout.agent.num_workers"
)
ENCODING_MODULES = "agent_loop.chat."


@dataclass(frozen=True, slots=True)
class LoopLag:
    """Delay of timers since the measurement began."""

    max_s: float = 0.0
    mean_s: float = 0.0
    late_share: float = 0.0
    """Share of the time in which the loop was blocked for more than `LATE_S` at once."""


class LagMonitor:
    """Measures the lag inside `measuring`, and warns about blocks that last longer than `WARN_S`.

    A thread logs the warning while the block lasts, with the line of code that blocks. It warns about the first block,
    and then about each block that is twice as long as the last one reported. The lag includes the time in which the
    process does not run, because it is stopped or the machine is busy. That time causes no warning, since no change of
    user code would help.
    """

    def __init__(self, activity_monitor: ActivityMonitor, *, warn_s: float = WARN_S) -> None:
        self._activity_monitor = activity_monitor
        self._warn_s = warn_s
        self._limit_s = warn_s
        self._num_open = 0
        self._timer: asyncio.TimerHandle | None = None
        self._started = 0.0
        self._num_ticks = 0
        self._sum_s = self._max_s = self._late_s = 0.0
        self._beat_at = 0.0
        """Time of the last tick on the machine's monotonic clock."""
        self._cpu_at = 0.0
        """CPU seconds of this process at the last tick."""
        self._paused_s = 0.0
        """Seconds since the last tick in which the process did not run."""

    @property
    def lag(self) -> LoopLag:
        """Lag since the measurement began."""
        if not self._num_ticks or self._max_s == 0.0:
            return LoopLag()
        elapsed_s = asyncio.get_running_loop().time() - self._started
        return LoopLag(self._max_s, self._sum_s / self._num_ticks, self._late_s / max(elapsed_s, TICK_S))

    @contextmanager
    def measuring(self) -> Generator[None]:
        """Measure the lag in the body. Several such contexts may overlap."""
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
        self._beat_at, self._cpu_at, self._paused_s = time.monotonic(), time.process_time(), 0.0
        self._num_ticks += 1
        self._sum_s += lag_s
        self._max_s = max(self._max_s, lag_s)
        self._late_s += lag_s if lag_s > LATE_S else 0.0
        was_starved = computed_s < passed_s / 2
        if lag_s > self._limit_s and not (was_starved and passed_s > lag_s / 2):
            # The thread missed this block: the thread did not run, or time is virtual.
            _, last = self._activity_monitor.last
            is_encoding = isinstance(last, waiting_for) and last.kind is WaitKind.ENCODE
            culprit = f"the last event before it was: {self._activity_monitor.last_event}"
            self._warn(lag_s, culprit, remedy=ENCODING_REMEDY if is_encoding else REMEDY)
        self._timer = loop.call_later(TICK_S, self._tick, loop, now + TICK_S)

    def _watch(self, loop: asyncio.AbstractEventLoop, thread_id: int, started: float) -> None:
        """Look for blocks until the measurement that began at `started` ends. Run in a thread."""
        while self._num_open and self._started == started:
            self._paused_s += _sleep(self._warn_s / 4)
            blocked_s = time.monotonic() - self._beat_at - TICK_S - self._paused_s
            if blocked_s > self._limit_s and loop.is_running():
                frame = sys._current_frames().get(thread_id)  # pyright: ignore[reportPrivateUsage]  (documented)
                if frame is None or _module(frame) != "selectors":
                    remedy = ENCODING_REMEDY if _is_encoding(frame) else REMEDY
                    self._warn(blocked_s, self._culprit(loop, frame), remedy=remedy)

    def _culprit(self, loop: asyncio.AbstractEventLoop, frame: FrameType | None) -> str:
        whose = self._activity_monitor.activity_of(asyncio.current_task(loop))
        stack = "".join(traceback.format_stack(frame)[-3:]) if frame is not None else "unknown\n"
        return f"{f'by {whose}, ' if whose else ''}at\n{stack.rstrip()}"

    def _warn(self, lag_s: float, culprit: str, *, remedy: str) -> None:
        self._limit_s = 2 * lag_s
        logger.warning("the event loop was blocked for %.1f s, %s\n%s", lag_s, culprit, remedy)


def _sleep(seconds: float) -> float:
    """Sleep, and return how many seconds the process did not run meanwhile.

    A thread that wakes late waited for the interpreter, which other threads computed with, or for the machine. Only the
    former uses CPU time of the process.
    """
    started, cpu_started = time.monotonic(), time.process_time()
    time.sleep(seconds)
    late_s = time.monotonic() - started - seconds
    return max(late_s - (time.process_time() - cpu_started), 0.0)


def _is_encoding(frame: FrameType | None) -> bool:
    """Return whether the code that runs was called by this package's encoding of messages."""
    while frame is not None and not _module(frame).startswith(ENCODING_MODULES):
        frame = frame.f_back
    return frame is not None


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))

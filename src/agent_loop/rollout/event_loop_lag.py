"""Lag of the event loop, and warnings about the code that blocks it."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from typing import Self

from agent_loop.runtime.activity import ActivityMonitor

logger = logging.getLogger(__name__)

TICK_S = 0.05
"""Seconds between two measurements. Shorter blocks are measured in part."""
LATE_S = 0.1
WARN_S = 1.0
REMEDY = (
    "all other trajectories wait while it is blocked; blocking code in an async tool, reward or loop is the usual "
    "cause: await it, or define the function with def, so that it runs in a thread. If the code is in agent_loop.chat, "
    "no tool, reward or loop is the cause: raise rollout.agent.num_workers, or use a fast tokenizer"
)


class LagMonitor:
    """Measures the lag in a `with` block, and warns about blocks that last longer than `WARN_S`.

    A thread logs the warning while the block lasts, with the line of code that blocks. It warns about the first block,
    and then about each block that is twice as long as the last one reported.
    """

    def __init__(self, activity_monitor: ActivityMonitor, *, warn_s: float = WARN_S) -> None:
        self.max_s = 0.0
        self._activity_monitor = activity_monitor
        self._limit_s = warn_s
        self._poll_s = warn_s / 4
        self._num_ticks = 0
        self._sum_s = self._late_s = 0.0
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self._loop, thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._started = self._loop.time()
        self._set_timer()
        threading.Thread(target=self._watch, args=(thread_id,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._ended.set()

    @property
    def mean_s(self) -> float:
        """Mean lag since the measurement began."""
        return self._sum_s / max(self._num_ticks, 1)

    @property
    def late_share(self) -> float:
        """Share of the time in which the loop was blocked for more than `LATE_S` at once."""
        return self._late_s / max(self._loop.time() - self._started, TICK_S)

    def _set_timer(self) -> None:
        self._beat_at = time.monotonic()
        self._timer = self._loop.call_later(TICK_S, self._tick, self._loop.time() + TICK_S)

    def _tick(self, due: float) -> None:
        lag_s = max(self._loop.time() - due, 0.0)
        self._num_ticks += 1
        self._sum_s += lag_s
        self.max_s = max(self.max_s, lag_s)
        self._late_s += lag_s if lag_s > LATE_S else 0.0
        if (
            lag_s > self._limit_s
        ):  # the code that blocked held the interpreter's lock, so the thread did not run
            self._warn(lag_s, f"the last event before it was: {self._activity_monitor.last_event}")
        self._set_timer()

    def _watch(self, thread_id: int) -> None:
        """Look for blocks until the measurement ends. Run in a thread."""
        while not self._ended.wait(self._poll_s):
            blocked_s = time.monotonic() - self._beat_at - TICK_S
            frame = sys._current_frames().get(thread_id)  # pyright: ignore[reportPrivateUsage]  (documented)
            is_idle = frame is None or frame.f_globals.get("__name__") == "selectors"
            if blocked_s > self._limit_s and not is_idle and self._loop.is_running():
                whose = self._activity_monitor.activity_of(asyncio.current_task(self._loop))
                stack = "".join(traceback.format_stack(frame)[-3:]).rstrip()
                self._warn(blocked_s, f"{f'by {whose}, ' if whose else ''}at\n{stack}")

    def _warn(self, lag_s: float, culprit: str) -> None:
        self._limit_s = 2 * lag_s
        logger.warning("the event loop was blocked for %.1f s, %s\n%s", lag_s, culprit, REMEDY)

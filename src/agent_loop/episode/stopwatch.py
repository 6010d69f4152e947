"""Where the time of an episode goes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from agent_loop.errors import EpisodeError
from agent_loop.runtime.time_scope import clock_of
from agent_loop.trajectory import AgentLoopMetrics


class Stopwatch:
    """The metrics of one episode, in the event loop's time. Single use."""

    def __init__(self) -> None:
        self.now: Callable[[], float] = _refuse_to_tell
        """The event loop's time.

        Raises: EpisodeError: It was not started.
        """
        self._sums: defaultdict[str, Any] = defaultdict(int)
        """By the names of the metrics."""
        self._started_at = 0.0

    @property
    def is_started(self) -> bool:
        return self.now is not _refuse_to_tell

    def start(self) -> None:
        """Raises: EpisodeError: It was started before."""
        if self.is_started:
            raise EpisodeError("an episode is used once; make a new one")
        self.now = clock_of(asyncio.get_running_loop())
        self._started_at = self.now()

    @property
    def metrics(self) -> AgentLoopMetrics:
        """Up to here."""
        seconds = self.now() - self._started_at if self.is_started else 0.0
        return AgentLoopMetrics(**self._sums, total=seconds)

    def count(self, metric: str, amount: float) -> None:
        """Adds to a metric."""
        self._sums[metric] += amount


def _refuse_to_tell() -> float:
    raise EpisodeError("the episode is not open; use it with `async with`")

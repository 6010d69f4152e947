"""Metrics of one episode: seconds and counts."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from agent_loop.errors import EpisodeError
from agent_loop.trajectory import AgentLoopMetrics


class Stopwatch:
    """Metrics of one episode, on the event loop's clock. Single use."""

    def __init__(self) -> None:
        self.now: Callable[[], float] = _raise_not_open
        """Clock of the event loop. Raises EpisodeError if the stopwatch was not started."""
        self._sums: defaultdict[str, Any] = defaultdict(int)
        """Sums by metric name."""
        self._started_at = 0.0

    @property
    def is_started(self) -> bool:
        return self.now is not _raise_not_open

    def start(self) -> None:
        """Start the clock.

        Raises:
            EpisodeError: The clock was started before.
        """
        if self.is_started:
            raise EpisodeError("the episode was entered before and can be used once; create a new episode")
        self.now = asyncio.get_running_loop().time
        self._started_at = self.now()

    @property
    def metrics(self) -> AgentLoopMetrics:
        """Metrics up to now."""
        seconds = self.now() - self._started_at if self.is_started else 0.0
        return AgentLoopMetrics(**self._sums, total=seconds)

    def count(self, metric: str, amount: float) -> None:
        """Add an amount to a metric."""
        self._sums[metric] += amount


def _raise_not_open() -> float:
    raise EpisodeError("the episode is not open; enter it with `async with`")

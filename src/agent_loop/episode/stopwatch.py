"""Metrics of one episode: seconds and counts."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from agent_loop.errors import EpisodeError
from agent_loop.runtime.time_scope import clock_of
from agent_loop.trajectory import AgentLoopMetrics


class Stopwatch:
    """Metrics of one episode, on the event loop's clock. Single use."""

    def __init__(self) -> None:
        self.now: Callable[[], float] = _raise_not_open
        """The event loop's time.

        Raises: EpisodeError: It was not started.
        """
        self._sums: defaultdict[str, Any] = defaultdict(int)
        """Sums by metric name."""
        self._started_at = 0.0

    @property
    def is_started(self) -> bool:
        return self.now is not _raise_not_open

    def start(self) -> None:
        """Raises: EpisodeError: It was started before."""
        if self.is_started:
            raise EpisodeError("an episode is used once; make a new one")
        self.now = clock_of(asyncio.get_running_loop())
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
    raise EpisodeError("the episode is not open; use it with `async with`")

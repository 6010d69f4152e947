"""Where the time of an episode goes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from agent_loop.errors import EpisodeError
from agent_loop.trajectory import AgentLoopMetrics


class Stopwatch:
    """The metrics of one episode, in the event loop's time. Single use."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, Any] = defaultdict(int)
        """By the names of the metrics."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started_at = 0.0

    def start(self) -> None:
        """Raises: EpisodeError: It was started before."""
        if self._loop is not None:
            raise EpisodeError("an episode is used once; make a new one")
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()

    @property
    def is_started(self) -> bool:
        return self._loop is not None

    @property
    def metrics(self) -> AgentLoopMetrics:
        """Up to here."""
        seconds = 0.0 if self._loop is None else self._loop.time() - self._started_at
        return AgentLoopMetrics(**self._sums, total=seconds)

    def count(self, metric: str, amount: float) -> None:
        """Adds to a metric."""
        self._sums[metric] += amount

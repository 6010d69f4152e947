"""Where the time of an episode goes."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from agent_loop.errors import EpisodeError
from agent_loop.trajectory import AgentLoopMetrics


class Stopwatch:
    """The metrics of one episode, in the event loop's time. Single use."""

    def __init__(self) -> None:
        self._metrics = AgentLoopMetrics()
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
        return replace(self._metrics, total=self._seconds)

    def count(self, **amounts: int) -> None:
        """Adds to metrics, by their names."""
        self._add(amounts)

    @contextmanager
    def timing(self, name: Literal["generate_sequences", "tool_calls"]) -> Generator[None]:
        """Adds the seconds that the body takes."""
        started_at = self._seconds
        try:
            yield
        finally:
            self._add({name: self._seconds - started_at})

    @property
    def _seconds(self) -> float:
        return 0.0 if self._loop is None else self._loop.time() - self._started_at

    def _add(self, amounts: dict[str, Any]) -> None:
        sums = {name: getattr(self._metrics, name) + amount for name, amount in amounts.items()}
        self._metrics = replace(self._metrics, **sums)

"""Clock, time limits and cancellation of an episode."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from enum import StrEnum
from types import TracebackType
from typing import Any, TypeVar

from agent_loop.errors import EpisodeError
from agent_loop.runtime.concurrency import CallAborted, running_in_background
from agent_loop.runtime.instances import OnReplay
from agent_loop.trajectory import AgentLoopMetrics, IncidentKind

ResultT = TypeVar("ResultT")

FINISH_GRACE_S = 10.0
"""Seconds that a call that may run only once has to end after its trajectory is cancelled."""


class TimeLimit(StrEnum):
    """Time limit of an episode. The value is the name of its setting."""

    GENERATE = "rollout.generate_timeout_s"
    TURN = "rollout.multi_turn.turn_timeout_s"
    TRAJECTORY = "rollout.trajectory_timeout_s"


_INCIDENTS = {
    TimeLimit.GENERATE: (IncidentKind.GENERATE_TIMEOUT, "its completion"),
    TimeLimit.TURN: (IncidentKind.TURN_TIMEOUT, "the completion and the reply to it"),
}


class Deadlines:
    """Timeout of an `async with` block whose end is the earliest of the limits that are set. Single use.

    Leaving the block raises TimeoutError if a limit was exceeded; `exceeded` is that limit.
    """

    def __init__(self) -> None:
        self._timeout = asyncio.timeout_at(None)
        self._is_open = False
        self._ends: dict[TimeLimit, float] = {}
        self._seconds: dict[TimeLimit, float] = {}

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._is_open = True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_open = False
        await self._timeout.__aexit__(kind, error, traceback)

    def begin(self, limit: TimeLimit, *, seconds: float) -> None:
        """Start a limit that ends in `seconds` from now."""
        self._seconds[limit] = seconds
        self._ends[limit] = asyncio.get_running_loop().time() + seconds
        self._reschedule()

    def end(self, limit: TimeLimit) -> None:
        """Remove a limit. Does nothing if a limit was exceeded before."""
        if limit in self._ends and not self._timeout.expired():
            del self._ends[limit]
            self._reschedule()

    def _reschedule(self) -> None:
        if self._is_open and not self._timeout.expired():
            self._timeout.reschedule(min(self._ends.values(), default=None))

    @property
    def incident(self) -> tuple[IncidentKind, str] | None:
        """Kind and description of the incident; None for the trajectory's own limit. Valid once a limit is exceeded."""
        if self.exceeded is TimeLimit.TRAJECTORY:
            return None
        kind, what = _INCIDENTS[self.exceeded]
        seconds = self._seconds[self.exceeded]
        return kind, f"the turn was cut: {what} took longer than {seconds:g} s ({self.exceeded})"

    @property
    def exceeded(self) -> TimeLimit:
        """Limit that was exceeded first. Valid once a limit is exceeded."""
        return min(self._ends, key=self._ends.__getitem__)


async def run_cancellable(
    function: Callable[[], Coroutine[Any, Any, ResultT]], *, event: asyncio.Event | None, on_replay: OnReplay
) -> ResultT:
    """Call a tool or an interaction and return its result. Raise `CallAborted` if the event ends the call.

    Once the event is set, a call that may run only once has `FINISH_GRACE_S` to end. Other calls are cancelled
    immediately, because they are repeated on resume.
    """
    if event is None:
        return await function()
    if event.is_set():
        raise CallAborted
    grace_s = FINISH_GRACE_S if on_replay is OnReplay.ONCE else 0.0
    scope = asyncio.timeout(None)

    async def limit() -> None:
        await event.wait()
        scope.reschedule(asyncio.get_running_loop().time() + grace_s)

    try:
        async with scope, running_in_background(limit()):
            return await function()
    except TimeoutError:
        if scope.expired():
            raise CallAborted from None
        raise


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
        """Start the clock."""
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

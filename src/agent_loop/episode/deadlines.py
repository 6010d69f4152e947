"""Time limits of an episode. The earliest applies."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from types import TracebackType

from agent_loop.trajectory import IncidentKind


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

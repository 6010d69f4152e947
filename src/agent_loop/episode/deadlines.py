"""The time limits of an episode, of which the earliest counts."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from types import TracebackType

from agent_loop.runtime.time_scope import TimeScope
from agent_loop.trajectory import IncidentKind


class TimeLimit(StrEnum):
    """What has to end in time; the value is the configuration's key."""

    GENERATE = "rollout.generate_timeout_s"
    TURN = "rollout.multi_turn.turn_timeout_s"
    TRAJECTORY = "rollout.trajectory_timeout_s"


_CUT_OFF = {
    TimeLimit.GENERATE: (IncidentKind.GENERATE_TIMEOUT, "its completion"),
    TimeLimit.TURN: (IncidentKind.TURN_TIMEOUT, "the completion and the reply to it"),
}


class Deadlines:
    """A time scope for `with` whose end moves as limits begin and end. Single use.

    Leaving it raises TimeoutError if a limit had passed; `passed` tells which.
    """

    def __init__(self) -> None:
        self._scope = TimeScope()
        self._ends: dict[TimeLimit, float] = {}
        self._seconds: dict[TimeLimit, float] = {}

    def __enter__(self) -> None:
        self._scope.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._scope.__exit__(kind, error, traceback)

    def begin(self, limit: TimeLimit, *, seconds: float) -> None:
        """Counts from here."""
        self._seconds[limit] = seconds
        self._ends[limit] = asyncio.get_running_loop().time() + seconds
        self._scope.move(min(self._ends.values()))

    def end(self, limit: TimeLimit) -> None:
        """What was limited ended in time."""
        if limit in self._ends and not self._scope.has_expired:
            del self._ends[limit]
            self._scope.move(min(self._ends.values(), default=None))

    @property
    def incident(self) -> tuple[IncidentKind, str] | None:
        """What the limit that passed cut off, once one has; None if that was the trajectory."""
        if self.passed is TimeLimit.TRAJECTORY:
            return None
        kind, what = _CUT_OFF[self.passed]
        seconds = self._seconds[self.passed]
        return kind, f"the turn was cut: {what} took longer than {seconds:g} s ({self.passed})"

    @property
    def passed(self) -> TimeLimit:
        """The limit that passed first, once one has."""
        return min(self._ends, key=self._ends.__getitem__)

"""What each trajectory waits for, known at any time: for whoever wants to know why nothing moves.

Whoever awaits something for a trajectory says so with `waiting_for`. Outside of a watched rollout that costs nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class WaitKind(StrEnum):
    """What a trajectory may wait for."""

    PLACE = "place at a server"
    COMPLETION = "completion"
    TOOL = "tool"
    INTERACTION = "interaction"
    REWARD = "reward"
    ENCODING = "encoding"
    CLOSING = "closing"
    JOURNAL = "journal"


@dataclass(slots=True, eq=False)
class Wait:
    """One thing that a trajectory waits for."""

    kind: WaitKind
    what: str
    """Its name, where there are several of the kind."""
    since: float
    """In the event loop's time."""
    task: asyncio.Task[Any] | None = field(repr=False)
    """Who waits."""

    def __str__(self) -> str:
        return f"{self.kind} {self.what}".rstrip()


@dataclass(slots=True, eq=False)
class Activity:
    """What one trajectory is about."""

    trajectory_id: str
    board: Board = field(repr=False)
    since: float
    """When it last began or ended a wait."""
    task: asyncio.Task[Any] | None = field(repr=False)
    waits: list[Wait] = field(default_factory=list[Wait])
    """Several where calls, branches or agents run at once; the oldest first."""


class Board:
    """The trajectories in flight. One per worker; its trajectories write to it."""

    def __init__(self) -> None:
        self.progressed_at = 0.0
        """When something last began or ended, in the event loop's time."""
        self._last: tuple[str, Wait | str] = ("", "")
        self._activities: dict[str, Activity] = {}

    @property
    def activities(self) -> Sequence[Activity]:
        return tuple(self._activities.values())

    @contextmanager
    def trajectory(self, trajectory_id: str) -> Generator[None]:
        """Shows a trajectory meanwhile; what its tasks wait for goes to it."""
        now = asyncio.get_running_loop().time()
        activity = Activity(trajectory_id, self, now, asyncio.current_task())
        self._activities[trajectory_id] = activity
        token = CURRENT.set(activity)
        try:
            yield
        finally:
            CURRENT.reset(token)
            del self._activities[trajectory_id]
            self.note(trajectory_id, "ended")

    def note(self, who: str, what: Wait | str) -> None:
        """Something moved: a wait is over, or what the text says."""
        self.progressed_at = asyncio.get_running_loop().time()
        self._last = (who, what)

    @property
    def last_event(self) -> str:
        """What moved last."""
        who, what = self._last
        return f"{who} {what}" if isinstance(what, str) else f"{who} had waited for {what}"

    def activity_of(self, task: asyncio.Task[Any] | None) -> str:
        """Whose a task is, as far as it can be told; empty if not."""
        for activity in self.activities:
            for wait in reversed(activity.waits):
                if wait.task is task:
                    return f"{activity.trajectory_id} ({wait})"
            if activity.task is task:
                return activity.trajectory_id
        return ""


CURRENT: ContextVar[Activity | None] = ContextVar("agent_loop_activity", default=None)
"""The trajectory that the running code belongs to."""


class waiting_for:
    """Shows that the running trajectory waits for this, as a context."""

    __slots__ = ("_activity", "_kind", "_wait", "_what")

    def __init__(self, kind: WaitKind, what: str = "") -> None:
        self._kind = kind
        self._what = what
        self._activity = CURRENT.get()

    def __enter__(self) -> None:
        activity = self._activity
        if activity is not None:
            now = asyncio.get_running_loop().time()
            self._wait = Wait(self._kind, self._what, now, asyncio.current_task())
            activity.since = now
            activity.waits.append(self._wait)

    def __exit__(self, *_: object) -> None:
        activity = self._activity
        if activity is not None:
            activity.waits.remove(self._wait)
            activity.board.note(activity.trajectory_id, self._wait)
            activity.since = activity.board.progressed_at


def note_progress() -> None:
    """Says that what the running trajectory waits for goes on, as when a part of a completion came."""
    activity = CURRENT.get()
    if activity is not None:
        activity.board.progressed_at = asyncio.get_running_loop().time()

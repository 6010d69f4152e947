"""What each trajectory waits for, known at any time, and what it has waited for: why nothing moves, where time went.

Whoever awaits something for a trajectory says so with `waiting_for`. Outside of a watched rollout that costs nothing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from msgspec import structs

from agent_loop.runtime.time_scope import clock_of
from agent_loop.trajectory import Span, Trace


class WaitKind(StrEnum):
    """What a trajectory may wait for."""

    ADMISSION = "admission"
    """To begin, where `rollout.max_concurrent` holds it back."""
    QUEUE = "queue"
    """A place at a server, where all are full."""
    GENERATE = "generate"
    """A completion, once it has a place."""
    TOOL = "tool"
    INTERACTION = "interaction"
    REWARD = "reward"
    ENCODE = "encode"
    CLOSE = "close"
    JOURNAL = "journal"
    USER = "user"
    """What a loop's own code says that it does."""


@dataclass(slots=True, eq=False)
class Activity:
    """What one trajectory is about."""

    trajectory_id: str
    board: Board = field(repr=False)
    since: float
    """When it last began or ended a wait."""
    task: asyncio.Task[Any] | None = field(repr=False)
    loop: asyncio.AbstractEventLoop = field(repr=False)
    """In which it runs; what it waits for may be in other threads."""
    clock: Callable[[], float] = field(repr=False)
    """Of that loop."""
    thread: int = field(repr=False)
    """Of that loop."""
    waits: list[waiting_for] = field(default_factory=list["waiting_for"])
    """Several where calls, branches or agents run at once; the oldest first."""
    asked_at: float = 0.0
    """When the trajectory was asked for, in the event loop's time."""
    num_numbered: int = 0
    """Of its spans, those that others may lie within."""
    spans: list[Span] = field(default_factory=list[Span])
    """What it has waited for."""
    _token: Token[Activity | None] | None = field(default=None, repr=False)

    def __enter__(self) -> Self:
        self._token = CURRENT.set(self)
        self.board.show(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            CURRENT.reset(self._token)
        self.board.remove(self)

    def add(self, wait: waiting_for, *, until: float) -> None:
        """A wait is over."""
        start, end = wait.since - self.asked_at, until - self.asked_at
        last = len(self.spans) - 1  # code in another thread may add one meanwhile
        if last >= 0 and self.spans[last].details is wait.details:
            self.spans[last] = structs.replace(self.spans[last], end=end)
        else:
            self.spans.append(Span(wait.kind, wait.what, start, end, wait.details))

    def trace(self) -> Trace:
        """Up to now."""
        seconds = self.clock() - self.asked_at
        return Trace(time.time() - seconds, seconds, tuple(self.spans))


class Board:
    """The trajectories in flight. One per worker; its trajectories write to it."""

    def __init__(self) -> None:
        self.progressed_at = 0.0
        """When something last began or ended, in the event loop's time."""
        self.last: tuple[str, waiting_for | str] = ("", "")
        """What moved last: who, and the wait that is over, or what they did."""
        self._activities: dict[str, Activity] = {}

    @property
    def activities(self) -> Sequence[Activity]:
        return tuple(self._activities.values())

    def trajectory(self, trajectory_id: str, *, asked_at: float | None = None) -> Activity:
        """A trajectory that begins, for `with`: shown meanwhile, and what its tasks wait for goes to it.

        Args:
            asked_at: Since when it has waited to begin, in the event loop's time; None is not at all.
        """
        loop = asyncio.get_running_loop()
        clock, task = clock_of(loop), asyncio.current_task(loop)
        now = clock()
        activity = Activity(trajectory_id, self, now, task, loop, clock, threading.get_ident())
        activity.asked_at = now if asked_at is None else asked_at
        if activity.asked_at < now:
            activity.spans.append(Span(WaitKind.ADMISSION, "", 0.0, now - activity.asked_at))
        return activity

    def show(self, activity: Activity) -> None:
        """Of the activity itself: it has begun."""
        self._activities[activity.trajectory_id] = activity

    def remove(self, activity: Activity) -> None:
        """Of the activity itself: it is over."""
        del self._activities[activity.trajectory_id]
        self.note(activity.trajectory_id, "ended", at=activity.clock())

    def note(self, who: str, what: str, *, at: float) -> None:
        """Somebody did something, at this time of the event loop."""
        self.progressed_at, self.last = at, (who, what)

    @property
    def last_event(self) -> str:
        """The last of it, in words."""
        who, what = self.last
        return f"{who} {what}" if isinstance(what, str) else f"{who} had waited for {what}"

    def activity_of(self, task: asyncio.Task[Any] | None) -> str:
        """Whose a task is, as far as it can be told; empty if not."""
        if task is None:
            return ""
        for activity in self.activities:
            for wait in reversed(activity.waits):
                if wait.task is task:
                    return f"{activity.trajectory_id} ({wait})"
            if activity.task is task:
                return activity.trajectory_id
        return ""


CURRENT: ContextVar[Activity | None] = ContextVar("agent_loop_activity", default=None)
"""The trajectory that the running code belongs to."""
WITHIN: ContextVar[int | None] = ContextVar("agent_loop_within", default=None)
"""The number of the span in which the running code lies."""
HOLDS_USER_CODE = frozenset({WaitKind.TOOL, WaitKind.INTERACTION, WaitKind.REWARD, WaitKind.USER})
"""Spans that have a number, since others may lie within them."""


class waiting_for:
    """Shows that the running trajectory waits for this, as a context, in any thread that has the trajectory's; what it
    yields are the details of the span, to be added to. They get `span`, its number, where user code runs in it, and
    `within`, the number of the span in which it lies. Meanwhile `since` tells when it began, in the event loop's time,
    and `task`, where user code runs on the event loop, who waits.

    Args:
        kind: What it waits for.
        what: Its name, where there are several of the kind.
        details: Of the span, where they are known before; waits that share them are one span, if nothing else ended in
            between.
    """

    __slots__ = ("_activity", "_token", "details", "kind", "since", "task", "what")

    def __init__(self, kind: WaitKind, what: str = "", *, details: dict[str, Any] | None = None) -> None:
        self.kind = kind
        self.what = what
        self.details: dict[str, Any] = {} if details is None else details
        self._activity = CURRENT.get()
        self._token: Token[int | None] | None = None
        self.task: asyncio.Task[Any] | None = None

    def __enter__(self) -> dict[str, Any]:
        activity = self._activity
        if activity is not None:
            within = WITHIN.get()
            if within is not None:
                self.details["within"] = within
            if self.kind in HOLDS_USER_CODE:
                activity.num_numbered += 1
                self.details["span"] = activity.num_numbered
                self._token = WITHIN.set(activity.num_numbered)
                if threading.get_ident() == activity.thread:
                    self.task = asyncio.current_task(activity.loop)
            self.since = activity.since = activity.clock()
            activity.waits.append(self)
        return self.details

    def __exit__(self, *_: object) -> None:
        activity = self._activity
        if activity is not None:
            if self._token is not None:
                WITHIN.reset(self._token)
            now = activity.since = activity.board.progressed_at = activity.clock()
            activity.board.last = (activity.trajectory_id, self)
            activity.waits.remove(self)
            activity.add(self, until=now)

    def __str__(self) -> str:
        return f"{self.kind} {self.what}".rstrip()


def note_progress() -> None:
    """Says that what the running trajectory waits for goes on, as when a part of a completion came."""
    activity = CURRENT.get()
    if activity is not None:
        activity.board.progressed_at = activity.clock()

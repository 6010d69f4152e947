"""Current and past waits of each trajectory.

Code that awaits something for a trajectory does so within `waiting_for`. The watchdog reads the current waits, and the
trace of a trajectory holds the past ones. Outside of a monitored rollout `waiting_for` costs nothing.
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

from agent_loop.trajectory import Span, Trace


class WaitKind(StrEnum):
    """Kinds of waits of a trajectory."""

    ADMISSION = "admission"
    """Permission to start, limited by `rollout.max_concurrent`."""
    QUEUE = "queue"
    """A free slot on a server."""
    GENERATE = "generate"
    """A completion of a request in flight."""
    TOOL = "tool"
    INTERACTION = "interaction"
    REWARD = "reward"
    ENCODE = "encode"
    CLOSE = "close"
    JOURNAL = "journal"
    USER = "user"
    """A wait that a custom loop has named."""


@dataclass(slots=True, eq=False)
class Activity:
    """Current and past waits of one trajectory."""

    trajectory_id: str
    monitor: ActivityMonitor = field(repr=False)
    since: float
    """When a wait last started or ended, in the event loop's time."""
    task: asyncio.Task[Any] | None = field(repr=False)
    loop: asyncio.AbstractEventLoop = field(repr=False)
    """Event loop that runs the trajectory. A wait may take place in another thread."""
    clock: Callable[[], float] = field(repr=False)
    """Clock of the event loop."""
    thread: int = field(repr=False)
    """Id of the event loop's thread."""
    waits: list[waiting_for] = field(default_factory=list["waiting_for"])
    """Current waits, oldest first. There are several if calls, branches or agents run concurrently."""
    requested_at: float = 0.0
    """When the trajectory was requested, in the event loop's time."""
    num_numbered: int = 0
    """Number of the spans that can enclose others."""
    spans: list[Span] = field(default_factory=list[Span])
    """Past waits."""
    _token: Token[Activity | None] | None = field(default=None, repr=False)

    def __enter__(self) -> Self:
        self._token = CURRENT_ACTIVITY.set(self)
        self.monitor.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            CURRENT_ACTIVITY.reset(self._token)
        self.monitor.remove(self)

    def add(self, wait: waiting_for, *, until: float) -> None:
        """Record a wait that has ended."""
        start, end = wait.since - self.requested_at, until - self.requested_at
        last = len(self.spans) - 1  # code in another thread may append a span after this line
        if last >= 0 and self.spans[last].details is wait.details:
            self.spans[last] = structs.replace(self.spans[last], end=end)
        else:
            self.spans.append(Span(wait.kind, wait.what, start, end, wait.details))

    def trace(self) -> Trace:
        """Return the spans up to the current time."""
        seconds = self.clock() - self.requested_at
        return Trace(time.time() - seconds, seconds, tuple(self.spans))


class ActivityMonitor:
    """The activities of all running trajectories of one worker."""

    def __init__(self) -> None:
        self.progressed_at = 0.0
        """When any wait last started or ended, in the event loop's time."""
        self.last: tuple[str, waiting_for | str] = ("", "")
        """The last event: a trajectory id, and the wait that ended or a description."""
        self._activities: dict[str, Activity] = {}

    @property
    def activities(self) -> Sequence[Activity]:
        return tuple(self._activities.values())

    def trajectory(self, trajectory_id: str, *, requested_at: float | None = None) -> Activity:
        """Return the activity of a trajectory that starts, for use in a `with` statement.

        Waits of tasks that start in the body are recorded on this activity.

        Args:
            requested_at: When the trajectory was requested, in the event loop's time. None means now.
        """
        loop = asyncio.get_running_loop()
        now = loop.time()
        activity = Activity(
            trajectory_id, self, now, asyncio.current_task(loop), loop, loop.time, threading.get_ident()
        )
        activity.requested_at = now if requested_at is None else requested_at
        if activity.requested_at < now:
            activity.spans.append(Span(WaitKind.ADMISSION, "", 0.0, now - activity.requested_at))
        return activity

    def add(self, activity: Activity) -> None:
        """Add the activity of a trajectory that has started."""
        self._activities[activity.trajectory_id] = activity

    def remove(self, activity: Activity) -> None:
        """Remove the activity of a trajectory that has ended."""
        del self._activities[activity.trajectory_id]
        self.note(activity.trajectory_id, "ended", at=activity.clock())

    def note(self, who: str, what: str, *, at: float) -> None:
        """Record an event at a time of the event loop."""
        self.progressed_at, self.last = at, (who, what)

    @property
    def last_event(self) -> str:
        """Description of the last event."""
        who, what = self.last
        return f"{who} {what}" if isinstance(what, str) else f"{who} had waited for {what}"

    def activity_of(self, task: asyncio.Task[Any] | None) -> str:
        """Return the trajectory, and the wait, that a task belongs to; an empty string if unknown."""
        if task is None:
            return ""
        for activity in self.activities:
            for wait in reversed(activity.waits):
                if wait.task is task:
                    return f"{activity.trajectory_id} ({wait})"
            if activity.task is task:
                return activity.trajectory_id
        return ""


CURRENT_ACTIVITY: ContextVar[Activity | None] = ContextVar("agent_loop_activity", default=None)
"""Activity of the trajectory that the running code belongs to."""
ENCLOSING_SPAN: ContextVar[int | None] = ContextVar("agent_loop_within", default=None)
"""Number of the span that encloses the running code."""
RUNS_USER_CODE = frozenset({WaitKind.TOOL, WaitKind.INTERACTION, WaitKind.REWARD, WaitKind.USER})
"""Kinds of spans that are numbered because they can enclose others."""


class waiting_for:
    """Context manager that records what the running trajectory waits for. Yields the details of the span.

    Code in the body may add to the details. Two entries are added here: `span`, the number of a span that runs user
    code, and `within`, the number of the enclosing span. It may be entered in any thread that has the trajectory's
    context variables. Within the body, `since` is the start in the event loop's time, and `task` is the task that runs
    user code on the event loop.

    Args:
        kind: What the trajectory waits for.
        what: Its name, if there are several of this kind.
        details: Details of the span that are known beforehand. Consecutive waits with the same details object are
            recorded as one span.
    """

    __slots__ = ("_activity", "_token", "details", "kind", "since", "task", "what")

    def __init__(self, kind: WaitKind, what: str = "", *, details: dict[str, Any] | None = None) -> None:
        self.kind = kind
        self.what = what
        self.details: dict[str, Any] = {} if details is None else details
        self._activity = CURRENT_ACTIVITY.get()
        self._token: Token[int | None] | None = None
        self.task: asyncio.Task[Any] | None = None

    def __enter__(self) -> dict[str, Any]:
        activity = self._activity
        if activity is not None:
            within = ENCLOSING_SPAN.get()
            if within is not None:
                self.details["within"] = within
            if self.kind in RUNS_USER_CODE:
                activity.num_numbered += 1
                self.details["span"] = activity.num_numbered
                self._token = ENCLOSING_SPAN.set(activity.num_numbered)
                if threading.get_ident() == activity.thread:
                    self.task = asyncio.current_task(activity.loop)
            self.since = activity.since = activity.clock()
            activity.waits.append(self)
        return self.details

    def __exit__(self, *_: object) -> None:
        activity = self._activity
        if activity is not None:
            if self._token is not None:
                ENCLOSING_SPAN.reset(self._token)
            now = activity.since = activity.monitor.progressed_at = activity.clock()
            activity.monitor.last = (activity.trajectory_id, self)
            activity.waits.remove(self)
            activity.add(self, until=now)

    def __str__(self) -> str:
        return f"{self.kind} {self.what}".rstrip()


def note_progress() -> None:
    """Record progress of the running trajectory, such as an arrived chunk of a completion."""
    activity = CURRENT_ACTIVITY.get()
    if activity is not None:
        activity.monitor.progressed_at = activity.clock()

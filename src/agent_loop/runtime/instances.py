"""Instances of tools and interactions: opened at first use, closed exactly once, one for each trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from enum import StrEnum
from functools import partial
from typing import Any
from uuid import uuid4

from agent_loop.errors import ConfigError, EpisodeError
from agent_loop.runtime.activity import WaitKind, waiting_for
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.isolated_task import ABANDON_GRACE_S, DeadlineExpired
from agent_loop.runtime.user_code import run_bounded
from agent_loop.trajectory import Incident, IncidentKind


class OnReplay(StrEnum):
    """How a call to a tool or an interaction is handled when its trajectory is replayed.

    A trajectory is replayed from the journal after a crash, and from its output after a cancellation.
    """

    RECORDED = "recorded"
    """Return the recorded reply and run nothing. For code without state and side effects. A call without a recorded
    reply is run again."""
    RERUN = "rerun"
    """Run the call again, which restores the state of the new instance, and return the recorded reply. For state that
    depends on the calls alone. A call without a recorded reply is run again."""
    ONCE = "once"
    """Run no call twice. Return the recorded reply. A tool call without a recorded reply returns an error. A trajectory
    that would have to restart from its first turn fails instead."""
    RESTART = "restart"
    """Return the recorded reply and consider the instance's state lost. The trajectory restarts from its first turn
    when another call would read that state, and at once if a call has no recorded reply."""

    @classmethod
    def _missing_(cls, value: object) -> OnReplay:
        raise ConfigError(f"on_replay is {value!r}; give one of {', '.join(cls)}")


class TrajectoryInstance:
    """Instance of a shared object for one trajectory: opened at first use, closed exactly once.

    An opening that fails or is cancelled may have allocated resources, so it is closed like any other. The next use
    then opens a new instance with a new id.
    """

    def __init__(
        self,
        name: str,
        *,
        trajectory: str = "",
        open_as: Callable[[str], Awaitable[Any]],
        close_as: Callable[[str], Awaitable[Any]],
        has_state: bool = True,
    ) -> None:
        self.name = name
        self.instance_id: str | None = None
        """None until an opening has succeeded."""
        self._trajectory = trajectory
        self._open_as = open_as
        self._close_as = close_as
        self._has_state = has_state
        self._started: list[str] = []
        self._num_closing = 0
        self._is_closed = False
        self._lock = asyncio.Lock()

    @property
    def num_open(self) -> int:
        """Number of openings that were started and are not closed."""
        return len(self._started) + self._num_closing

    async def open(self) -> str:
        """Return the instance's id. The first call opens the instance."""
        if self.instance_id is not None and not self._is_closed:
            return self.instance_id
        if not self._has_state and not self._is_closed:
            self.instance_id = self._new_id()
            return self.instance_id
        async with self._lock:
            if self._is_closed:
                raise EpisodeError(f"{self.name} was used after its trajectory was closed; use it before")
            if self.instance_id is None:
                instance_id = self._new_id()
                self._started.append(instance_id)
                await self._open_as(instance_id)
                self.instance_id = instance_id
            return self.instance_id

    def _new_id(self) -> str:
        return "-".join(filter(None, (self._trajectory, uuid4().hex)))

    async def close(self, *, timeout_s: float) -> list[str]:
        """Close every opening that was started. Return one line for each that failed to close."""
        self._is_closed = True
        started, self._started = self._started, []
        self._num_closing += len(started)
        problems: list[str] = []
        for instance_id in started:
            try:
                await run_bounded(
                    partial(self._close_as, instance_id), timeout_s=timeout_s, name=f"closing {self.name}"
                )
            except DeadlineExpired as error:
                problems.append(f"closing {self.name} {error}")
            except Exception as error:  # noqa: BLE001  (recorded; the other instances are closed too)
                problems.append(f"closing {self.name} raised {describe_error(error)}")
            finally:
                self._num_closing -= 1
        return problems


async def close_instances(
    instances: Iterable[TrajectoryInstance], *, what: str, timeout_s: float, incidents: list[Incident]
) -> None:
    """Close all instances concurrently, each within `timeout_s`, even if the caller is cancelled.

    Args:
        what: What the trajectory waits for while instances are open, such as "tools".
        incidents: Receives an incident for each failure, also after a cancellation.
    """

    async def close(instance: TrajectoryInstance) -> None:
        problems = await instance.close(timeout_s=timeout_s)
        incidents.extend(Incident(IncidentKind.CLOSE_FAILED, problem) for problem in problems)

    async def close_all() -> None:
        async with asyncio.TaskGroup() as group:
            for instance in instances:
                group.create_task(close(instance))

    instances = list(instances)
    most_openings = max([instance.num_open for instance in instances], default=0)
    if most_openings:
        with waiting_for(WaitKind.CLOSE, what):
            await run_shielded(close_all, timeout_s=(timeout_s + ABANDON_GRACE_S) * (most_openings + 1))

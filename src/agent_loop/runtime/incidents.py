"""Incidents of the running trajectory, recorded by code that has no reference to the trajectory."""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Self

from agent_loop.trajectory.incidents import Incident, IncidentKind


class IncidentCollector:
    """Collects the incidents that occur in the body of a `with` statement, in its tasks and threads too."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.incidents: list[Incident] = []
        self._token: Token[IncidentCollector | None] | None = None

    @staticmethod
    def current() -> IncidentCollector | None:
        """Return the collector of the trajectory that the running code belongs to."""
        return _CURRENT.get()

    def __enter__(self) -> Self:
        self._token = _CURRENT.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _CURRENT.reset(self._token)


def record_incident(kind: IncidentKind, detail: str) -> None:
    """Record an incident on the trajectory that the running code belongs to, if there is one."""
    collector = _CURRENT.get()
    if collector is not None:
        collector.incidents.append(Incident(kind, detail))


_CURRENT: ContextVar[IncidentCollector | None] = ContextVar("agent_loop_incidents", default=None)

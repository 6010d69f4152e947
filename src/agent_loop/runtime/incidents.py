"""Lets code note an incident on the running trajectory without knowing the trajectory."""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Self

from agent_loop.trajectory.incidents import Incident, IncidentKind


class IncidentCollector:
    """Incidents of one trajectory that are noted while the body of a `with` block runs, tasks and threads included.

    Args:
        owner: The trajectory's id, for the log.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.incidents: list[Incident] = []
        self._token: Token[IncidentCollector | None] | None = None

    @staticmethod
    def current() -> IncidentCollector | None:
        """Return those of the trajectory that the running code belongs to."""
        return _CURRENT.get()

    def __enter__(self) -> Self:
        self._token = _CURRENT.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _CURRENT.reset(self._token)


def record_incident(kind: IncidentKind, detail: str) -> None:
    """Note an incident on the trajectory that the running code belongs to, if it belongs to one."""
    notes = _CURRENT.get()
    if notes is not None:
        notes.incidents.append(Incident(kind, detail))


_CURRENT: ContextVar[IncidentCollector | None] = ContextVar("agent_loop_row_notes", default=None)

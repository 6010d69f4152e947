"""Time that a trajectory spent, by activity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct


class Span(Struct, frozen=True):
    """Period in which a trajectory waited for something or its loop ran."""

    kind: str
    """A `WaitKind`."""
    name: str
    """Name of the server or tool, if there are several."""
    start: float
    """Seconds since the trajectory was requested."""
    end: float
    details: Mapping[str, Any] = {}
    """Further values; `docs/tracing.md` lists the keys of each kind."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Trace(Struct, frozen=True):
    """Spans of one trajectory. All branches of a rollout share one trace."""

    began_at: float
    """Time of the request for the trajectory, in seconds since 1970."""
    seconds: float
    """Seconds from `began_at` until the trajectory was scored."""
    spans: tuple[Span, ...]
    """Ordered by their ends. Spans can contain each other or overlap."""

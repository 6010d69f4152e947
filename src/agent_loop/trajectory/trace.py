"""What a trajectory spent its time on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct


class Span(Struct, frozen=True):
    """Something that a trajectory waited for, or that its loop did."""

    kind: str
    """A `WaitKind`."""
    name: str
    """Which one, where there are several of the kind: the server, the tool."""
    start: float
    """Seconds since the trajectory was asked for."""
    end: float
    details: Mapping[str, Any] = {}
    """What else is known of it; `docs/tracing.md` lists the keys of each kind."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Trace(Struct, frozen=True):
    """The time of one trajectory; that of all its branches, where it has several."""

    began_at: float
    """When it was asked for, in seconds since 1970."""
    seconds: float
    """From there until it was scored."""
    spans: tuple[Span, ...]
    """In the order in which they ended; some lie within others, or beside them."""

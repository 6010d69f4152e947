"""Conversations that clients name, so that their later turns find their prefix where it was computed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager

from agent_loop.completions.sampling import Sampler


class SessionTable:
    """The named sessions of a pool. The longest unused ones are ended where there are too many.

    Args:
        sampler: Is told of sessions that end.
        max_sessions: So many are kept.
    """

    def __init__(self, sampler: Sampler, *, max_sessions: int = 4096) -> None:
        self._sampler = sampler
        self._max_sessions = max_sessions
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._busy: set[str] = set()

    @contextmanager
    def use(self, name: str | None) -> Generator[str | None]:
        """The session of that name; None if there is no name, or the session is in use: one takes one request at
        a time, and the second one is sampled in a session of its own."""
        if name is None or name in self._busy:
            yield None
            return
        self._idle.pop(name, None)
        self._busy.add(name)
        try:
            yield f"named-{name}"
        finally:
            self._busy.discard(name)
            self._idle[name] = None
            if len(self._idle) > self._max_sessions:
                oldest, _ = self._idle.popitem(last=False)
                self._sampler.end_session(f"named-{oldest}")

"""Sessions named by clients. Requests of one session go to the same server, which has their prefix in its cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager

from agent_loop.completions.sampling import Sampler


class SessionTable:
    """Named sessions of a pool. The least recently used session is ended when there are too many.

    Args:
        sampler: Ends sessions.
        max_sessions: Maximum number of idle sessions.
    """

    def __init__(self, sampler: Sampler, *, max_sessions: int = 4096) -> None:
        self._sampler = sampler
        self._max_sessions = max_sessions
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._busy: set[str] = set()

    @contextmanager
    def use(self, name: str | None) -> Generator[str | None]:
        """Yield the session id of a name, and mark the session as busy until exit.

        Yields None if there is no name, or if another request is using the session. Such a request is sampled in its
        own session, because a session takes one request at a time.
        """
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

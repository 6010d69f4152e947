"""Which server gets the next request. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from agent_loop.errors import ConfigError


class LoadBalancer:
    """Least requests in flight first, ties to the least recently chosen; a session stays where it started.

    The one owner of in-flight counts and of session affinity.
    """

    def __init__(self, num_servers: int) -> None:
        if num_servers < 1:
            raise ConfigError("there is no server to send requests to; give at least one")
        self._in_flight = [0] * num_servers
        self._last_chosen = [-1] * num_servers
        self._server_of: dict[str, int] = {}
        self._clock = 0

    @property
    def in_flight(self) -> Sequence[int]:
        """Leases per server."""
        return tuple(self._in_flight)

    @property
    def num_leases(self) -> int:
        return sum(self._in_flight)

    @property
    def num_sessions(self) -> int:
        return len(self._server_of)

    def server_of(self, session: str) -> int | None:
        """The server on which a session lives, if it has begun."""
        return self._server_of.get(session)

    @contextmanager
    def lease(self, session: str) -> Generator[int]:
        """Counts one request against a server while it lasts, and yields the server's index."""
        server = self._server_of.get(session)
        if server is None:
            server = min(
                range(len(self._in_flight)), key=lambda i: (self._in_flight[i], self._last_chosen[i])
            )
            self._server_of[session] = server
            self._last_chosen[server] = self._clock
            self._clock += 1
        self._in_flight[server] += 1
        try:
            yield server
        finally:
            self._in_flight[server] -= 1

    def end_session(self, session: str) -> int | None:
        """Forgets a session and returns the server on which it lived."""
        return self._server_of.pop(session, None)

"""Policies to compare with: what other systems do. None of them keeps a line; servers queue for themselves."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from agent_loop.servers.policy import BalancerConfig, Policy, Rank, ServerState, SessionState


class _SentAtOnce(Policy):
    keeps_queue = False


class RoundRobin(_SentAtOnce):
    """Each request goes to the next server."""

    def rank(self, server: ServerState) -> Rank:
        return (0.0, 0, server.last_chosen)

    def choose(self, session: SessionState, *, best: ServerState) -> ServerState | None:
        return best


class LeastRequests(_SentAtOnce):
    """Each request goes to the server with the fewest, ties to the least recently chosen."""

    def rank(self, server: ServerState) -> Rank:
        return (float(server.num_in_flight), 0, server.last_chosen)

    def choose(self, session: SessionState, *, best: ServerState) -> ServerState | None:
        return best


class StickyLeastRequests(_SentAtOnce):
    """The first request of a session goes to the server with the fewest, ties to the first in the list; all later ones
    go there too, whatever happens: verl's policy."""

    def rank(self, server: ServerState) -> Rank:
        return (float(server.num_in_flight), 0, server.number)

    def choose(self, session: SessionState, *, best: ServerState) -> ServerState | None:
        return session.server or best


class StickyHash(_SentAtOnce):
    """The session's name alone tells the server."""

    def __init__(self, config: BalancerConfig | None = None) -> None:
        super().__init__(config)
        self._servers: dict[str, ServerState] = {}
        self._in_order: Sequence[ServerState] = ()

    def rank(self, server: ServerState) -> Rank:
        if server.name not in self._servers:
            self._servers[server.name] = server
            self._in_order = tuple(self._servers.values())
        return (0.0, 0, server.number)

    def choose(self, session: SessionState, *, best: ServerState) -> ServerState | None:
        return session.server or self._in_order[crc32(session.id.encode()) % len(self._in_order)]

    def left(self, server: ServerState) -> None:
        self._servers.pop(server.name, None)
        self._in_order = tuple(self._servers.values())

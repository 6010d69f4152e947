"""Balancing policies of other systems, for comparison. None of them queues requests before the servers."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from agent_loop.servers.policy import BalancerConfig, Policy, Rank, ServerState, SessionState


class _UnqueuedPolicy(Policy):
    keeps_queue = False


class RoundRobin(_UnqueuedPolicy):
    """Send each request to the next server in turn."""

    def rank(self, server: ServerState) -> Rank:
        return (0.0, 0, server.last_chosen)

    def choose(self, session: SessionState, *, best: ServerState) -> ServerState | None:
        return best


class LeastRequests(_UnqueuedPolicy):
    """Send each request to the server with the fewest requests; ties go to the least recently chosen server."""

    def rank(self, server: ServerState) -> Rank:
        return (float(server.num_in_flight), 0, server.last_chosen)

    def choose(self, session: SessionState, *, best: ServerState) -> ServerState | None:
        return best


class StickyLeastRequests(_UnqueuedPolicy):
    """Send the first request of a session to the server with the fewest requests, and later ones to the same server.

    Ties go to the first server in the list. This is verl's policy.
    """

    def rank(self, server: ServerState) -> Rank:
        return (float(server.num_in_flight), 0, server.number)

    def choose(self, session: SessionState, *, best: ServerState) -> ServerState | None:
        return session.server or best


class StickyHash(_UnqueuedPolicy):
    """Send each request to the server that the hash of its session id selects."""

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

    def on_server_removed(self, server: ServerState) -> None:
        self._servers.pop(server.name, None)
        self._in_order = tuple(self._servers.values())

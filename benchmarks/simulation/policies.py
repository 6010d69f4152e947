"""Balancing policies of other systems, for comparison. None of them queues requests before the servers."""

from __future__ import annotations

from zlib import crc32

from agent_loop.servers.balancer import LoadBalancer, ServerState, SessionState, SlotGrant


class _Unqueued(LoadBalancer):
    def add_server(self, name: str, *, max_in_flight: int | None = None) -> list[SlotGrant]:
        return super().add_server(name)


class RoundRobin(_Unqueued):
    """Send each request to the next server in turn."""

    def rank(self, server: ServerState) -> tuple[float, int, int]:
        return (0.0, 0, server.last_chosen)

    def choose(self, session: SessionState, *, best: ServerState) -> ServerState | None:
        return best


class LeastRequests(_Unqueued):
    """Send each request to the server with the fewest requests; ties go to the least recently chosen server."""

    def rank(self, server: ServerState) -> tuple[float, int, int]:
        return (float(server.num_in_flight), 0, server.last_chosen)

    def choose(self, session: SessionState, *, best: ServerState) -> ServerState | None:
        return best


class StickyLeastRequests(_Unqueued):
    """Send the first request of a session to the server with the fewest requests, and later ones to the same server.

    Ties go to the first server in the list. This is verl's policy.
    """

    def rank(self, server: ServerState) -> tuple[float, int, int]:
        return (float(server.num_in_flight), 0, server.number)

    def choose(self, session: SessionState, *, best: ServerState) -> ServerState | None:
        return session.server or best


class StickyHash(_Unqueued):
    """Send each request to the server that the hash of its session id selects."""

    def rank(self, server: ServerState) -> tuple[float, int, int]:
        return (0.0, 0, server.number)

    def choose(self, session: SessionState, *, best: ServerState) -> ServerState | None:
        servers = list(self._servers.values())
        return session.server or servers[crc32(session.id.encode()) % len(servers)]

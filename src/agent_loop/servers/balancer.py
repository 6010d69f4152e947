"""Load balancer: in-flight counts, session affinity and the queue. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count

from msgspec import Struct

from agent_loop.errors import ConfigError
from agent_loop.servers.policy import (
    BalancerConfig,
    LeastWork,
    Policy,
    Rank,
    RequestQueue,
    ServerState,
    SessionState,
    SlotRequest,
)
from agent_loop.servers.priority_queue import IndexedPriorityQueue

__all__ = ["BalancerConfig", "LoadBalancer", "SlotGrant", "SlotRequest"]

NUM_STEAL_CANDIDATES = 8


class SlotGrant(Struct, frozen=True):
    """Slot on a server, held until it is released."""

    request: SlotRequest
    server: str
    work: float
    """Expected work of the request, in tokens to decode."""
    moved_from: str | None = None
    """Previous server of the session, which may drop the session's cache."""
    num_known_tokens: int = 0
    """Number of prompt tokens that this server has computed or sampled before."""


@dataclass(frozen=True, slots=True)
class _QueuedRequest:
    request: SlotRequest
    queue: RequestQueue
    key: tuple[float, int]
    """Priority, then order of arrival."""


class LoadBalancer:
    """Load balancer over a set of servers. It alone writes in-flight counts and session affinity.

    Requests beyond the slots of all servers are queued here, not in the servers. A queued request goes to the first
    server with a free slot.
    """

    def __init__(
        self,
        servers: Iterable[str] = (),
        *,
        config: BalancerConfig | None = None,
        policy: Policy | None = None,
    ) -> None:
        """Create a balancer without servers.

        Args:
            policy: Policy that chooses the servers; None is `LeastWork(config)`.
        """
        self.policy = policy or LeastWork(config)
        self.config = self.policy.config
        self._servers: dict[str, ServerState] = {}
        self._with_free_slot: IndexedPriorityQueue[Rank] = IndexedPriorityQueue()
        self._with_queue: IndexedPriorityQueue[Rank] = IndexedPriorityQueue()
        """Servers whose own queue is not empty, highest load first."""
        self._changed: dict[str, ServerState] = {}
        """Servers whose rank must be updated before the next choice."""
        self._unassigned: RequestQueue = IndexedPriorityQueue()
        """Queued requests that any server may serve."""
        self._sessions: dict[str, SessionState] = {}
        self._leases: dict[str, SlotGrant] = {}
        self._queued: dict[str, _QueuedRequest] = {}
        self._order = count()
        self._epoch = self.policy.epoch
        for server in servers:
            self.add_server(server)

    # -- state -----------------------------------------------------------------------------------------------------

    @property
    def servers(self) -> Sequence[str]:
        return tuple(self._servers)

    @property
    def in_flight(self) -> dict[str, int]:
        """Number of granted slots per server."""
        return {server.name: server.num_in_flight for server in self._servers.values()}

    @property
    def outstanding_work(self) -> dict[str, float]:
        """Expected number of tokens that each server has yet to decode."""
        return {server.name: server.work for server in self._servers.values()}

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def num_running_tokens(self) -> int:
        """Number of prompt tokens of all requests that hold a slot."""
        return sum(lease.request.num_prompt_tokens for lease in self._leases.values())

    @property
    def num_session_tokens(self) -> int:
        """Number of tokens of the last prompts of all sessions."""
        return sum(session.num_tokens for session in self._sessions.values())

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def server_of(self, session: str) -> str | None:
        """Return the server of a session, or None if the session has none."""
        known = self._sessions.get(session)
        return None if known is None or known.server is None else known.server.name

    # -- requests --------------------------------------------------------------------------------------------------

    def acquire(self, request: SlotRequest) -> SlotGrant | None:
        """Grant a request a slot, or queue the request and return None.

        A later `release`, `add_server`, `grant_free_slots` or `drop_owner` returns the grant of a queued request.
        """
        lease = self._leases.get(request.id)
        if lease is not None or request.id in self._queued:
            return lease
        session = self._sessions.get(request.session)
        if session is None:
            session = self._sessions[request.session] = SessionState(request.session)
        session.num_tokens = request.num_prompt_tokens
        server = self._choose(session)
        if server is not None:
            return self._grant(request, session, server)
        priority = -request.expected_remaining if self.config.longest_first else 0.0
        queue = self._unassigned if session.server is None else session.server.queue
        self._enqueue(_QueuedRequest(request, queue, (priority, next(self._order))), session.server)
        return None

    def release(
        self, request_id: str, *, num_new_tokens: int | None = None, seconds: float | None = None
    ) -> list[SlotGrant]:
        """Free the slot of a request, or remove the request from the queue. Does nothing for an unknown request.

        Args:
            num_new_tokens: Number of sampled tokens; None if the request failed.
            seconds: Seconds from the grant to the release, from which the server's speed is learned; None if unknown.

        Returns:
            The grants of queued requests that got the free slots.
        """
        lease = self._leases.pop(request_id, None)
        if lease is None:
            if request_id in self._queued:
                self._dequeue(request_id)
            return []
        server = self._servers[lease.server]
        try:
            self.policy.on_released(lease.request, on=server, num_new_tokens=num_new_tokens, seconds=seconds)
        finally:  # frees the slot even if the policy raises
            server.num_in_flight -= 1
            server.work = max(0.0, server.work - lease.work) if server.num_in_flight else 0.0
        session = self._sessions.get(lease.request.session)
        if session is not None and session.server is server and num_new_tokens is not None:
            session.num_cached = lease.request.num_prompt_tokens + num_new_tokens
        self._changed[server.name] = server
        return self._grant_slots_of(server)

    @contextmanager
    def lease(self, session: str) -> Generator[str]:
        """Hold a slot for one request and yield the server's name. For tests and for servers without a request limit.

        Raises:
            ConfigError: The request would be queued.
        """
        request = SlotRequest(f"{session}/{next(self._order)}", session)
        lease = self.acquire(request)
        try:
            if lease is None:
                raise ConfigError("every server is full; use acquire, which queues the request")
            yield lease.server
        finally:
            self.release(request.id)

    def end_session(self, session: str) -> str | None:
        """Forget a session and return the name of its server."""
        known = self._sessions.pop(session, None)
        if known is None or known.server is None:
            return None
        known.server.num_sessions -= 1
        self._changed[known.server.name] = known.server
        return known.server.name

    def drop_owner(self, owner: str) -> list[SlotGrant]:
        """Release all slots and queued requests of an owner. Return the grants of other requests."""
        for queued in [q for q in self._queued.values() if q.request.owner == owner]:
            self._dequeue(queued.request.id)
        granted: list[SlotGrant] = []
        for lease in [lease for lease in self._leases.values() if lease.request.owner == owner]:
            granted += self.release(lease.request.id)
            self.end_session(lease.request.session)
        return granted

    # -- membership ------------------------------------------------------------------------------------------------

    def add_server(
        self, name: str, *, max_in_flight: int | None = None, speed: float = 1.0
    ) -> list[SlotGrant]:
        """Add an idle server. Sessions stay on their servers.

        Args:
            max_in_flight: Number of slots; None sets no limit.
            speed: Speed relative to the other servers.

        Returns:
            The grants of queued requests.

        Raises:
            ConfigError: A server with this name exists.
        """
        if name in self._servers:
            raise ConfigError(f"there are two servers with the name {name!r}; give each server a unique name")
        limit = max_in_flight if self.policy.keeps_queue else None
        number = next(self._order)
        server = self._servers[name] = ServerState(name, number, limit or float("inf"), speed)
        server.last_chosen = next(self._order)
        self._changed[name] = server
        return self._grant_slots_of(server)

    def remove_server(self, name: str) -> list[str]:
        """Remove a server with its slots, and return the ids of its sessions.

        The next request of each of these sessions goes to another server, which computes the whole context. Sessions
        on other servers stay there.
        """
        server = self._servers.pop(name, None)
        if server is None:
            return []
        self._with_free_slot.discard(name)
        self._with_queue.discard(name)
        self._changed.pop(name, None)
        self.policy.on_server_removed(server)
        for lease in [lease for lease in self._leases.values() if lease.server == name]:
            del self._leases[lease.request.id]
        moved: list[str] = []
        for session_id, session in self._sessions.items():
            if session.server is server:
                session.server, session.num_cached = None, 0
                moved.append(session_id)
        for queued in [q for q in self._queued.values() if q.queue is server.queue]:
            self._enqueue(replace(queued, queue=self._unassigned), None)
        return moved

    def set_external_requests(self, name: str, num_requests: int) -> None:
        """Set the number of requests that a server has from other clients."""
        server = self._servers.get(name)
        if server is not None:
            server.num_external = num_requests
            self._changed[name] = server

    def grant_free_slots(self) -> list[SlotGrant]:
        """Grant free slots to queued requests. Call it after `remove_server`."""
        granted: list[SlotGrant] = []
        for server in list(self._servers.values()):
            granted += self._grant_slots_of(server)
        return granted

    # -- inside ----------------------------------------------------------------------------------------------------

    def _choose(self, session: SessionState) -> ServerState | None:
        """Return the server for a session's request, or None to queue the request."""
        if len(self._servers) == 1:
            [only] = self._servers.values()
            return only if only.has_free_slot else None
        self._rank_changed()
        best = self._with_free_slot.first()
        return None if best is None else self.policy.choose(session, best=self._servers[best])

    def _grant_slots_of(self, server: ServerState) -> list[SlotGrant]:
        """Grant a server's free slots to queued requests."""
        granted: list[SlotGrant] = []
        while self._queued and server.has_free_slot and (request := self._next_for(server)) is not None:
            granted.append(self._grant(request, self._sessions[request.session], server))
        return granted

    def _next_for(self, server: ServerState) -> SlotRequest | None:
        """Remove the next request for a server from its queue and return it, or return None.

        The first request comes first among the server's own sessions and unassigned sessions. If there is none, a
        request moves here from the server with the highest load, if the policy finds the move worthwhile.
        """
        own, unassigned = server.queue.first_key(), self._unassigned.first_key()
        if own is not None and (unassigned is None or own < unassigned):
            return self._dequeue(server.queue.first() or "")
        if unassigned is not None:
            return self._dequeue(self._unassigned.first() or "")
        self._rank_changed()
        busiest = self._with_queue.first()
        if busiest is None:
            return None
        home = self._servers[busiest]
        chosen = home.queue.first_where(
            lambda request_id: self.policy.is_worth_moving(
                self._sessions[self._queued[request_id].request.session], home=home, to=server
            ),
            at_most=NUM_STEAL_CANDIDATES,
        )
        return None if chosen is None else self._dequeue(chosen)

    def _enqueue(self, queued: _QueuedRequest, home: ServerState | None) -> None:
        self._queued[queued.request.id] = queued
        queued.queue.put(queued.request.id, queued.key)
        if home is not None:
            self._changed[home.name] = home

    def _dequeue(self, request_id: str) -> SlotRequest:
        queued = self._queued.pop(request_id)
        queued.queue.discard(request_id)
        home = self._sessions[queued.request.session].server
        if home is not None and not len(home.queue):
            self._with_queue.discard(home.name)
        return queued.request

    def _grant(self, request: SlotRequest, session: SessionState, server: ServerState) -> SlotGrant:
        moved_from = None
        if session.server is not server:
            if session.server is not None:
                moved_from = session.server.name
                session.server.num_sessions -= 1
                self._changed[moved_from] = session.server
            session.server, session.num_cached = server, 0
            server.num_sessions += 1
        work = self.policy.estimate_work(request, num_cached=session.num_cached)
        server.work += work
        server.num_in_flight += 1
        server.last_chosen = next(self._order)
        self._changed[server.name] = server
        lease = self._leases[request.id] = SlotGrant(
            request, server.name, work, moved_from, session.num_cached
        )
        self.policy.on_granted(
            request, on=server
        )  # last, so that the counts are consistent if the policy raises
        return lease

    def _rank_changed(self) -> None:
        if self._epoch != self.policy.epoch:
            self._epoch = self.policy.epoch
            self._changed |= self._servers
        for name, server in self._changed.items():
            rank = self.policy.rank(server)
            if server.has_free_slot:
                self._with_free_slot.put(name, rank)
            else:
                self._with_free_slot.discard(name)
            if self._queued and len(server.queue):
                load, num_sessions, last_chosen = rank
                self._with_queue.put(name, (-load, num_sessions, last_chosen))
        self._changed.clear()

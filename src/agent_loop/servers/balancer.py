"""Load balancer: choice of servers, session affinity and the queue. Pure: no I/O, no clock.

Work is measured in tokens to decode. Each prompt token that the server has not computed yet adds `prefill_cost`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from msgspec import Struct

from agent_loop.errors import ConfigError

LENGTH_MEMORY = 0.02
"""Weight of the newest completion in the running mean of their lengths."""
MAX_MARGIN = 1 / 8
"""Largest escape margin in completions, as a share of the server's slots."""


@dataclass(frozen=True, slots=True)
class BalancerConfig:
    """Settings of the balancer."""

    prefill_cost: float = 0.05
    """Cost of computing one prompt token, in decoded tokens."""
    escape_margin: float = 8.0
    """Difference in load, in completions of mean length, above which a session moves to another server. The cost of
    computing the session's prefix again is added. Capped at an eighth of the server's slots."""
    expected_tokens: float = 256.0
    """Assumed length of a completion, in tokens, until completions have ended."""


class SlotRequest(Struct, frozen=True):
    """Request for a slot on a server, for one completion."""

    id: str
    """Unique id. A second `acquire` with the same id has no effect."""
    session: str
    num_prompt_tokens: int = 0
    max_tokens: int | None = None


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


@dataclass(slots=True)
class ServerState:
    """State of one server in the balancer."""

    name: str
    number: int
    """Order in which the servers joined."""
    max_in_flight: float
    last_chosen: int
    """Sequence number of the last grant; the least recently chosen server has the lowest."""
    work: float = 0.0
    """Outstanding work of the in-flight requests, in tokens to decode."""
    num_in_flight: int = 0
    num_external: int = 0
    """Last reported number of requests from other clients."""
    num_sessions: int = 0

    @property
    def has_free_slot(self) -> bool:
        return self.num_in_flight < self.max_in_flight


@dataclass(slots=True)
class SessionState:
    """State of one session in the balancer."""

    id: str
    server: ServerState | None = None
    num_tokens: int = 0
    """Number of tokens of the last prompt."""
    num_cached: int = 0
    """Number of context tokens that the server has computed."""


class LoadBalancer:
    """Load balancer over a set of servers. It alone writes in-flight counts and session affinity.

    Each request goes to the server with the least outstanding work. A session stays on the server that has its prefix
    until the imbalance costs more than computing the prefix again. Requests beyond the slots of all servers are queued
    here, not in the servers. Free slots go to queued requests in order of arrival.

    A subclass may override `rank` and `choose`.
    """

    def __init__(self, servers: Iterable[str] = (), *, config: BalancerConfig | None = None) -> None:
        self.config = config or BalancerConfig()
        self.mean_tokens = self.config.expected_tokens
        self._servers: dict[str, ServerState] = {}
        self._sessions: dict[str, SessionState] = {}
        self._leases: dict[str, SlotGrant] = {}
        self._queued: dict[str, tuple[SlotRequest, SessionState]] = {}
        """Queued requests and their sessions, in order of arrival."""
        self._order = count()
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

    # -- choice ----------------------------------------------------------------------------------------------------

    def rank(self, server: ServerState) -> tuple[float, int, int]:
        """Return the rank of a server. A new session goes to the server with the lowest rank."""
        return (self._load(server), server.num_sessions, server.last_chosen)

    def choose(self, session: SessionState, *, best: ServerState) -> ServerState | None:
        """Return the server for a session's next request, or None to queue it for its own server.

        Args:
            best: Server with the lowest rank among those with a free slot.
        """
        home = session.server
        if home is None or home is best or self._is_worth_moving(session, home=home, to=best):
            return best
        return home if home.has_free_slot else None

    def _load(self, server: ServerState) -> float:
        """Return the outstanding work in completions of mean length."""
        return server.work / self.mean_tokens + server.num_external

    def _is_worth_moving(self, session: SessionState, *, home: ServerState, to: ServerState) -> bool:
        prefill = self.config.prefill_cost * session.num_cached / self.mean_tokens
        margin = min(self.config.escape_margin, MAX_MARGIN * home.max_in_flight)
        return self._load(home) > self._load(to) + prefill + margin

    # -- requests --------------------------------------------------------------------------------------------------

    def acquire(self, request: SlotRequest) -> SlotGrant | None:
        """Grant a request a slot, or queue the request and return None.

        A later `release`, `add_server` or `grant_free_slots` returns the grant of a queued request.
        """
        session = self._sessions.setdefault(request.session, SessionState(request.session))
        session.num_tokens = request.num_prompt_tokens
        free = [server for server in self._servers.values() if server.has_free_slot]
        server = self.choose(session, best=min(free, key=self.rank)) if free else None
        if server is not None:
            return self._grant(request, session, server)
        self._queued[request.id] = (request, session)
        return None

    def release(self, request_id: str, *, num_new_tokens: int | None = None) -> list[SlotGrant]:
        """Free the slot of a request, or remove it from the queue. Return the grants of queued requests that got slots.

        Does nothing for an unknown request.

        Args:
            num_new_tokens: Number of sampled tokens; None if the request failed.
        """
        lease = self._leases.pop(request_id, None)
        if lease is None:
            self._queued.pop(request_id, None)
            return []
        server = self._servers[lease.server]
        server.num_in_flight -= 1
        server.work = max(0.0, server.work - lease.work) if server.num_in_flight else 0.0
        if num_new_tokens:
            self.mean_tokens += LENGTH_MEMORY * (num_new_tokens - self.mean_tokens)
        session = self._sessions.get(lease.request.session)
        if session is not None and session.server is server and num_new_tokens is not None:
            session.num_cached = lease.request.num_prompt_tokens + num_new_tokens
        return self._grant_slots_of(server)

    def end_session(self, session: str) -> None:
        """Forget a session."""
        known = self._sessions.pop(session, None)
        if known is not None and known.server is not None:
            known.server.num_sessions -= 1

    # -- membership ------------------------------------------------------------------------------------------------

    def add_server(self, name: str, *, max_in_flight: int | None = None) -> list[SlotGrant]:
        """Add an idle server and return the grants of queued requests. Sessions stay on their servers."""
        if name in self._servers:
            raise ConfigError(f"there are two servers with the name {name!r}; give each server a unique name")
        limit = max_in_flight or float("inf")
        server = self._servers[name] = ServerState(name, next(self._order), limit, next(self._order))
        return self._grant_slots_of(server)

    def remove_server(self, name: str) -> list[str]:
        """Remove a server with its slots, and return the ids of its sessions.

        The next request of each of these sessions goes to another server, which computes the whole context. Sessions
        on other servers stay there.
        """
        server = self._servers.pop(name, None)
        if server is None:
            return []
        self._leases = {key: lease for key, lease in self._leases.items() if lease.server != name}
        moved = [session_id for session_id, session in self._sessions.items() if session.server is server]
        for session_id in moved:
            self._sessions[session_id].server, self._sessions[session_id].num_cached = None, 0
        return moved

    def set_external_requests(self, name: str, num_requests: int) -> None:
        """Set the number of requests that a server has from other clients."""
        server = self._servers.get(name)
        if server is not None:
            server.num_external = num_requests

    def grant_free_slots(self) -> list[SlotGrant]:
        """Grant free slots to queued requests. Call it after `remove_server`."""
        return [grant for server in list(self._servers.values()) for grant in self._grant_slots_of(server)]

    # -- inside ----------------------------------------------------------------------------------------------------

    def _grant_slots_of(self, server: ServerState) -> list[SlotGrant]:
        """Grant a server's free slots to queued requests."""
        granted: list[SlotGrant] = []
        while server.has_free_slot and (queued := self._next_for(server)) is not None:
            request, session = queued
            del self._queued[request.id]
            granted.append(self._grant(request, session, server))
        return granted

    def _next_for(self, server: ServerState) -> tuple[SlotRequest, SessionState] | None:
        """Return the queued request that a free server should get, or None.

        The first request that arrived among the server's own sessions and sessions without a server comes first. If
        there is none, the first one whose session is worth moving comes.
        """
        for request, session in self._queued.values():
            if session.server is None or session.server is server:
                return request, session
        for request, session in self._queued.values():
            if session.server is not None and self._is_worth_moving(session, home=session.server, to=server):
                return request, session
        return None

    def _grant(self, request: SlotRequest, session: SessionState, server: ServerState) -> SlotGrant:
        moved_from = None
        if session.server is not server:
            if session.server is not None:
                moved_from = session.server.name
                session.server.num_sessions -= 1
            session.server, session.num_cached = server, 0
            server.num_sessions += 1
        work = self._estimate_work(request, num_cached=session.num_cached)
        server.work += work
        server.num_in_flight += 1
        server.last_chosen = next(self._order)
        grant = SlotGrant(request, server.name, work, moved_from, session.num_cached)
        self._leases[request.id] = grant
        return grant

    def _estimate_work(self, request: SlotRequest, *, num_cached: int) -> float:
        """Return the expected work of a request, in tokens to decode."""
        expected = self.mean_tokens
        if request.max_tokens is not None:
            expected = min(expected, request.max_tokens)
        return expected + self.config.prefill_cost * max(0, request.num_prompt_tokens - num_cached)

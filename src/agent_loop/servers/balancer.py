"""Which server gets the next request. Pure: no I/O, no clock.

Work is counted in tokens to decode. A token of the prompt that the server has not computed yet costs
`prefill_cost` of that.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count

from agent_loop.errors import ConfigError, ServerDied
from agent_loop.servers.ranking import Ranking

LENGTH_MEMORY = 0.02
"""Share of the newest completion in the running mean of their lengths."""
NUM_STEAL_CANDIDATES = 8


@dataclass(frozen=True, slots=True)
class BalancerConfig:
    """How servers are chosen."""

    prefill_cost: float = 0.05
    """Of one prompt token, in decoded tokens: prefill is that much cheaper."""
    escape_margin: float = 4.0
    """A session leaves its server if that has so many completions' worth of work more than another one, beside the
    cost of computing the session's prefix again."""
    expected_tokens: float = 256.0
    """Length of a completion before any has ended."""
    longest_first: bool = False
    """Of the requests that wait, first the one whose trajectory has the most left to do."""


@dataclass(frozen=True, slots=True)
class Request:
    """One completion that wants a place on a server."""

    id: str
    """Asking twice with one id is asking once."""
    session: str
    owner: str = ""
    """Who asks: if it dies, all that it holds falls at once."""
    num_prompt_tokens: int = 0
    max_tokens: int | None = None
    expected_remaining: float = 0.0
    """Tokens that the trajectory is expected to take yet, where somebody knows."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A place on a server, held until it is released."""

    request: Request
    server: str
    work: float
    moved_from: str | None = None
    """The server that the session left, which may forget it."""


@dataclass(slots=True)
class _Server:
    name: str
    max_in_flight: float
    speed: float = 1.0
    work: float = 0.0
    num_in_flight: int = 0
    num_sessions: int = 0
    last_chosen: int = -1
    waiting: Ranking[tuple[float, int]] = field(default_factory=Ranking[tuple[float, int]])
    """Requests whose session lives here."""

    @property
    def load(self) -> float:
        """Work in flight, in tokens of a server of speed 1."""
        return self.work / self.speed

    @property
    def has_place(self) -> bool:
        return self.num_in_flight < self.max_in_flight


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: Request
    line: Ranking[tuple[float, int]]
    place: tuple[float, int]


@dataclass(slots=True)
class _Session:
    server: _Server | None
    num_cached: int = 0
    """Tokens of its context that its server has computed."""


class LoadBalancer:
    """Least outstanding work first, ties to the least recently chosen; a session stays where its prefix is until the
    imbalance costs more than computing the prefix elsewhere.

    The one owner of in-flight counts and of session affinity. Where every server has as many requests as it computes
    at once, the rest wait here, not in the servers: they go to whichever has a place first.
    """

    def __init__(self, servers: Iterable[str] = (), *, config: BalancerConfig | None = None) -> None:
        self.config = config or BalancerConfig()
        self._servers: dict[str, _Server] = {}
        self._with_place: Ranking[tuple[float, int, int]] = Ranking()
        self._homeless: Ranking[tuple[float, int]] = Ranking()
        """Requests that any server may take."""
        self._sessions: dict[str, _Session] = {}
        self._leases: dict[str, Lease] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._order = count()
        self._mean_tokens = self.config.expected_tokens
        for server in servers:
            self.add_server(server)

    # -- what is there ---------------------------------------------------------------------------------------------

    @property
    def servers(self) -> Sequence[str]:
        return tuple(self._servers)

    @property
    def in_flight(self) -> dict[str, int]:
        """Leases per server."""
        return {server.name: server.num_in_flight for server in self._servers.values()}

    @property
    def outstanding_work(self) -> dict[str, float]:
        """Tokens that each server has to decode for its leases, as far as one can tell."""
        return {server.name: server.work for server in self._servers.values()}

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def server_of(self, session: str) -> str | None:
        """The server on which a session lives, if it has begun."""
        known = self._sessions.get(session)
        return None if known is None or known.server is None else known.server.name

    # -- requests --------------------------------------------------------------------------------------------------

    def acquire(self, request: Request) -> Lease | None:
        """A place for a request; None if it has to wait. One that waits comes out of a later `release`,
        `add_server` or `drop_owner`.

        Raises:
            ServerDied: There is no server.
        """
        if request.id in self._leases:
            return self._leases[request.id]
        if request.id in self._waiting:
            return None
        if not self._servers:
            raise ServerDied("no server is left", request_id=request.session)
        session = self._sessions.setdefault(request.session, _Session(server=None))
        server = self._choose(session)
        if server is not None:
            return self._grant(request, server)
        priority = -request.expected_remaining if self.config.longest_first else 0.0
        line = self._homeless if session.server is None else session.server.waiting
        self._line_up(_Waiting(request, line, (priority, next(self._order))))
        return None

    def release(self, request_id: str, *, num_new_tokens: int | None = None) -> list[Lease]:
        """Gives a place back, or leaves the line; does nothing if that was done before.

        Args:
            num_new_tokens: How long the completion was; None if it failed.

        Returns:
            The leases of requests that waited and got a place by this.
        """
        if request_id in self._waiting:
            self._leave_line(request_id)
            return []
        lease = self._leases.pop(request_id, None)
        if lease is None:
            return []
        if num_new_tokens is not None:
            self._mean_tokens += LENGTH_MEMORY * (num_new_tokens - self._mean_tokens)
        server = self._servers.get(lease.server)
        if server is None:
            return []
        server.num_in_flight -= 1
        server.work = max(0.0, server.work - lease.work) if server.num_in_flight else 0.0
        session = self._sessions.get(lease.request.session)
        if session is not None and session.server is server and num_new_tokens is not None:
            session.num_cached = lease.request.num_prompt_tokens + num_new_tokens
        self._rank(server)
        return self._fill(server)

    @contextmanager
    def lease(self, session: str) -> Generator[str]:
        """Counts one request against a server while it lasts, and yields the server's name: for tests and for
        servers that take any number of requests.

        Raises:
            ConfigError: It would have to wait.
        """
        request = Request(f"{session}/{next(self._order)}", session)
        lease = self.acquire(request)
        try:
            if lease is None:
                raise ConfigError("every server is full; use acquire, which waits in line")
            yield lease.server
        finally:
            self.release(request.id)

    def end_session(self, session: str) -> str | None:
        """Forgets a session and returns the server on which it lived."""
        known = self._sessions.pop(session, None)
        if known is None or known.server is None:
            return None
        known.server.num_sessions -= 1
        self._rank(known.server)
        return known.server.name

    def drop_owner(self, owner: str) -> list[Lease]:
        """Takes back everything that an owner holds or waits for; returns what others got by it."""
        for waiting in [w for w in self._waiting.values() if w.request.owner == owner]:
            self._leave_line(waiting.request.id)
        granted: list[Lease] = []
        for lease in [lease for lease in self._leases.values() if lease.request.owner == owner]:
            granted += self.release(lease.request.id)
            self.end_session(lease.request.session)
        return granted

    # -- membership ------------------------------------------------------------------------------------------------

    def add_server(self, name: str, *, max_in_flight: int | None = None, speed: float = 1.0) -> list[Lease]:
        """A server joins, idle. Sessions stay where they are.

        Args:
            max_in_flight: Requests that it computes at once; None gives it any number.
            speed: Relative to the others.

        Returns:
            The leases of requests that waited.

        Raises:
            ConfigError: There is one of this name.
        """
        if name in self._servers:
            raise ConfigError(f"there are two servers of the name {name!r}; give each its own")
        server = self._servers[name] = _Server(name, max_in_flight or float("inf"), speed)
        self._rank(server)
        return self._fill(server)

    def remove_server(self, name: str) -> list[str]:
        """A server leaves: its leases fall, and its sessions, which are returned, begin anew elsewhere with their next
        request. All others stay where they are."""
        server = self._servers.pop(name, None)
        if server is None:
            return []
        self._with_place.discard(name)
        for lease in [lease for lease in self._leases.values() if lease.server == name]:
            del self._leases[lease.request.id]
        moved: list[str] = []
        for session_id, session in self._sessions.items():
            if session.server is server:
                session.server, session.num_cached = None, 0
                moved.append(session_id)
        for waiting in [w for w in self._waiting.values() if w.line is server.waiting]:
            self._line_up(replace(waiting, line=self._homeless))
        return moved

    def fill(self) -> list[Lease]:
        """Gives free places to requests that wait, as after `remove_server`."""
        granted: list[Lease] = []
        for server in list(self._servers.values()):
            granted += self._fill(server)
        return granted

    # -- the policy ------------------------------------------------------------------------------------------------

    def _choose(self, session: _Session) -> _Server | None:
        """Where a request of this session goes now; None if it is to wait."""
        best = self._with_place.first()
        home = session.server
        if best is None:
            return None
        if home is None or self._is_worth_moving(session, home=home, to=self._servers[best]):
            return self._servers[best]
        return home if home.has_place else None

    def _is_worth_moving(self, session: _Session, *, home: _Server, to: _Server) -> bool:
        lost = self.config.prefill_cost * session.num_cached
        margin = self.config.escape_margin * self._mean_tokens
        return home.load > to.load + lost / to.speed + margin

    def _fill(self, server: _Server) -> list[Lease]:
        """Gives a server's free places to requests that wait."""
        granted: list[Lease] = []
        while server.has_place and (request := self._next_for(server)) is not None:
            granted.append(self._grant(request, server))
        return granted

    def _next_for(self, server: _Server) -> Request | None:
        """The first in line of those that live here and those that live nowhere; else one whose own server has so
        much to do that it is worth moving."""
        lines = [line for line in (server.waiting, self._homeless) if len(line)]
        if lines:
            line = min(lines, key=lambda line: line.first_key() or (0.0, 0))
            return self._leave_line(line.first() or "")
        others = [other for other in self._servers.values() if len(other.waiting)] if self._waiting else []
        if not others:
            return None
        busiest = max(others, key=lambda other: other.load)
        chosen = busiest.waiting.first_where(
            lambda request_id: self._is_worth_moving(
                self._sessions[self._waiting[request_id].request.session], home=busiest, to=server
            ),
            at_most=NUM_STEAL_CANDIDATES,
        )
        return None if chosen is None else self._leave_line(chosen)

    def _line_up(self, waiting: _Waiting) -> None:
        self._waiting[waiting.request.id] = waiting
        waiting.line.put(waiting.request.id, waiting.place)

    def _leave_line(self, request_id: str) -> Request:
        waiting = self._waiting.pop(request_id)
        waiting.line.discard(request_id)
        return waiting.request

    def _grant(self, request: Request, server: _Server) -> Lease:
        session = self._sessions.setdefault(request.session, _Session(server=None))
        moved_from = session.server
        if session.server is not server:
            if session.server is not None:
                session.server.num_sessions -= 1
                self._rank(session.server)
            session.server, session.num_cached = server, 0
            server.num_sessions += 1
        expected = (
            self._mean_tokens if request.max_tokens is None else min(self._mean_tokens, request.max_tokens)
        )
        num_uncached = max(0, request.num_prompt_tokens - session.num_cached)
        work = expected + self.config.prefill_cost * num_uncached
        server.work += work
        server.num_in_flight += 1
        server.last_chosen = next(self._order)
        self._rank(server)
        left = moved_from.name if moved_from is not None and moved_from is not server else None
        lease = self._leases[request.id] = Lease(request, server.name, work, left)
        return lease

    def _rank(self, server: _Server) -> None:
        if server.name not in self._servers:
            return
        if server.has_place:
            self._with_place.put(server.name, (server.load, server.num_sessions, server.last_chosen))
        else:
            self._with_place.discard(server.name)

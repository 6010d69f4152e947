"""Policies that choose a server for a request. Pure: no I/O, no clock.

Work is counted in tokens to decode. A token of the prompt that the server has not computed yet costs
`prefill_cost` of that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec import Struct

from agent_loop.servers.ranking import Ranking
from agent_loop.servers.speeds import SpeedEstimate

LENGTH_MEMORY = 0.02
"""Weight of the newest completion in the running mean of their lengths."""
RANK_TOLERANCE = 0.2
"""Relative change of a step's overhead after which all servers are ranked again."""
MAX_MARGIN = 1 / 8
"""Of the requests that a server computes at once: the largest escape margin, in completions."""

Rank: TypeAlias = tuple[float, int, int]
Line: TypeAlias = Ranking[tuple[float, int]]
"""Queued requests: by priority, then by arrival."""


@dataclass(frozen=True, slots=True)
class BalancerConfig:
    """Settings of the balancer."""

    prefill_cost: float = 0.05
    """Cost of computing one prompt token, in decoded tokens."""
    escape_margin: float = 8.0
    """A session leaves its server if that has so many completions' worth of work more than another one, beside the
    cost of computing the session's prefix again. At most an eighth of what the server computes at once."""
    expected_tokens: float = 256.0
    """Assumed length of a completion, in tokens, until completions have ended."""
    longest_first: bool = False
    """Order of the queue: whether the request whose trajectory has the most work left comes first."""


class SlotRequest(Struct, frozen=True):
    """Request for a slot on a server, for one completion."""

    id: str
    """Unique id. A second `acquire` with the same id has no effect."""
    session: str
    owner: str = ""
    """Client that holds the slot. If it dies, all its slots are released."""
    num_prompt_tokens: int = 0
    max_tokens: int | None = None
    expected_remaining: float = 0.0
    """Predicted work left in the trajectory, in any unit; only comparisons count."""


@dataclass(slots=True)
class ServerState:
    """State of one server in the balancer."""

    name: str
    number: int
    """Order in which the servers joined."""
    max_in_flight: float
    given_speed: float = 1.0
    """Configured speed relative to the other servers."""
    work: float = 0.0
    num_in_flight: int = 0
    num_outside: int = 0
    """Number of requests of other clients, as far as it is known."""
    num_sessions: int = 0
    last_chosen: int = -1
    waiting: Line = field(default_factory=Ranking[tuple[float, int]])
    """Queued requests of the server's own sessions."""

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


class Policy(ABC):
    """Base class of policies. A policy ranks servers; the balancer keeps the counts."""

    keeps_queue: bool = True
    """Whether requests beyond a server's slots are queued in the balancer; otherwise they are queued in the server."""

    def __init__(self, config: BalancerConfig | None = None) -> None:
        self.config = config or BalancerConfig()
        self.mean_tokens = self.config.expected_tokens
        self.epoch = 0
        """Counter that increases when the ranks of all servers have changed."""

    @abstractmethod
    def rank(self, server: ServerState) -> Rank:
        """Return the rank of a server. A request that may go to any server goes to the one with the lowest rank."""

    @abstractmethod
    def choose(self, session: SessionState, *, best: ServerState) -> ServerState | None:
        """Return the server for a session's next request, or None to queue it for its own server.

        Args:
            best: Server with the lowest rank among those with a free slot.
        """

    def is_worth_moving(self, session: SessionState, *, home: ServerState, to: ServerState) -> bool:
        """Return whether a session whose request is queued for its own server should move to another one."""
        return False

    def work_of(self, request: SlotRequest, *, num_cached: int) -> float:
        """Return the expected cost of a request, in tokens to decode."""
        expected = (
            self.mean_tokens if request.max_tokens is None else min(self.mean_tokens, request.max_tokens)
        )
        return expected + self.config.prefill_cost * max(0, request.num_prompt_tokens - num_cached)

    def begun(self, request: SlotRequest, *, on: ServerState) -> None:
        """Note that a server was granted a request. The server's counts include the request."""

    def ended(
        self, request: SlotRequest, *, on: ServerState, num_new_tokens: int | None, seconds: float | None
    ) -> None:
        """Note that a request ended; one that failed has no tokens. The server's counts still include the request."""
        if num_new_tokens:
            self.mean_tokens += LENGTH_MEMORY * (num_new_tokens - self.mean_tokens)

    def left(self, server: ServerState) -> None:
        """Note that a server left the pool with all its requests."""


class LeastWork(Policy):
    """The server on which a completion would take the least time; a session stays where its prefix is until the
    imbalance costs more than computing the prefix elsewhere."""

    def __init__(self, config: BalancerConfig | None = None) -> None:
        super().__init__(config)
        self.speeds = SpeedEstimate()
        self._overhead = 0.0
        """Of a step, in requests: as it was when all servers were ranked last."""
        self._speeds_epoch = 0

    def rank(self, server: ServerState) -> Rank:
        return (self.load(server), server.num_sessions, server.last_chosen)

    def load(self, server: ServerState) -> float:
        """How long a token takes here, relative to what each request adds to a step of an ordinary server; work counts
        as so many completions of mean length."""
        requests = server.work / self.mean_tokens + server.num_outside
        return (self._overhead + requests) / self.speed(server)

    def speed(self, server: ServerState) -> float:
        """Return the speed relative to an ordinary server."""
        return server.given_speed * self.speeds.of(server.name)

    def choose(self, session: SessionState, *, best: ServerState) -> ServerState | None:
        home = session.server
        if home is None or home is best or self.is_worth_moving(session, home=home, to=best):
            return best
        return home if home.has_free_slot else None

    def is_worth_moving(self, session: SessionState, *, home: ServerState, to: ServerState) -> bool:
        lost = self.config.prefill_cost * session.num_cached / self.mean_tokens
        margin = min(self.config.escape_margin, MAX_MARGIN * home.max_in_flight)
        return self.load(home) > self.load(to) + lost / self.speed(to) + margin

    def begun(self, request: SlotRequest, *, on: ServerState) -> None:
        self.speeds.begin(request.id, server=on.name, num_in_flight=on.num_in_flight + on.num_outside)

    def ended(
        self, request: SlotRequest, *, on: ServerState, num_new_tokens: int | None, seconds: float | None
    ) -> None:
        super().ended(request, on=on, num_new_tokens=num_new_tokens, seconds=seconds)
        self.speeds.end(
            request.id,
            num_in_flight=on.num_in_flight + on.num_outside,
            num_new_tokens=num_new_tokens,
            seconds=seconds,
        )
        if abs(self.speeds.overhead - self._overhead) > RANK_TOLERANCE * self._overhead:
            self._overhead = self.speeds.overhead
            self.epoch += 1
        if self.speeds.epoch != self._speeds_epoch:
            self._speeds_epoch = self.speeds.epoch
            self.epoch += 1

    def left(self, server: ServerState) -> None:
        self.speeds.forget(server.name)

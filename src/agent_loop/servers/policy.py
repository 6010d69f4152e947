"""Policies that choose a server for a request. Pure: no I/O, no clock.

Work is measured in tokens to decode. Each prompt token that the server has not computed yet adds `prefill_cost`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec import Struct

from agent_loop.servers.decode_speed import DecodeSpeedEstimator
from agent_loop.servers.priority_queue import IndexedPriorityQueue

LENGTH_MEMORY = 0.02
"""Weight of the newest completion in the running mean of their lengths."""
RANK_TOLERANCE = 0.2
"""Relative change of a step's overhead after which all servers are ranked again."""
MAX_MARGIN = 1 / 8
"""Largest escape margin in completions, as a share of the server's slots."""

Rank: TypeAlias = tuple[float, int, int]
"""Rank of a server: load, number of sessions, and when it was last chosen."""
RequestQueue: TypeAlias = IndexedPriorityQueue[tuple[float, int]]
"""Queued requests, ordered by priority and then by arrival."""


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
    longest_first: bool = False
    """Whether the queue is ordered by remaining work, most first; otherwise by arrival."""


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
    """Expected work left in the session, in any unit; only comparisons count."""


@dataclass(slots=True)
class ServerState:
    """State of one server in the balancer."""

    name: str
    number: int
    """Order in which the servers joined."""
    max_in_flight: float
    configured_speed: float = 1.0
    """Configured speed relative to the other servers."""
    work: float = 0.0
    """Outstanding work of the in-flight requests, in tokens to decode."""
    num_in_flight: int = 0
    num_external: int = 0
    """Last reported number of requests from other clients."""
    num_sessions: int = 0
    last_chosen: int = -1
    """Sequence number of the last grant; the least recently chosen server has the lowest."""
    queue: RequestQueue = field(default_factory=IndexedPriorityQueue[tuple[float, int]])
    """Queued requests of the sessions on this server."""

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

    def estimate_work(self, request: SlotRequest, *, num_cached: int) -> float:
        """Return the expected work of a request, in tokens to decode."""
        expected = (
            self.mean_tokens if request.max_tokens is None else min(self.mean_tokens, request.max_tokens)
        )
        return expected + self.config.prefill_cost * max(0, request.num_prompt_tokens - num_cached)

    def on_granted(self, request: SlotRequest, *, on: ServerState) -> None:
        """Handle the grant of a slot. The server's counts include the request."""

    def on_released(
        self, request: SlotRequest, *, on: ServerState, num_new_tokens: int | None, seconds: float | None
    ) -> None:
        """Handle the release of a slot. The server's counts still include the request.

        Args:
            num_new_tokens: Number of sampled tokens; None if the request failed.
            seconds: Seconds from the grant to the release; None if unknown.
        """
        if num_new_tokens:
            self.mean_tokens += LENGTH_MEMORY * (num_new_tokens - self.mean_tokens)

    def on_server_removed(self, server: ServerState) -> None:
        """Handle the removal of a server with all its requests."""


class LeastWork(Policy):
    """Send each request to the server on which a completion would take the least time.

    A session stays on the server that has its prefix until the imbalance costs more than computing the prefix again.
    """

    def __init__(self, config: BalancerConfig | None = None) -> None:
        super().__init__(config)
        self.speeds = DecodeSpeedEstimator()
        self._overhead = 0.0
        """Overhead of a step, in requests, when all servers were last ranked."""
        self._speeds_epoch = 0

    def rank(self, server: ServerState) -> Rank:
        return (self.load(server), server.num_sessions, server.last_chosen)

    def load(self, server: ServerState) -> float:
        """Return the time that a server takes per token.

        The unit is the time that one request adds to a decoding step of a median server. The outstanding work is
        converted to a number of completions of mean length.
        """
        requests = server.work / self.mean_tokens + server.num_external
        return (self._overhead + requests) / self.speed(server)

    def speed(self, server: ServerState) -> float:
        """Return the decode speed of a server, relative to the median server."""
        return server.configured_speed * self.speeds.speed_of(server.name)

    def choose(self, session: SessionState, *, best: ServerState) -> ServerState | None:
        home = session.server
        if home is None or home is best or self.is_worth_moving(session, home=home, to=best):
            return best
        return home if home.has_free_slot else None

    def is_worth_moving(self, session: SessionState, *, home: ServerState, to: ServerState) -> bool:
        prefill = self.config.prefill_cost * session.num_cached / self.mean_tokens
        margin = min(self.config.escape_margin, MAX_MARGIN * home.max_in_flight)
        return self.load(home) > self.load(to) + prefill / self.speed(to) + margin

    def on_granted(self, request: SlotRequest, *, on: ServerState) -> None:
        self.speeds.begin(request.id, server=on.name, num_in_flight=on.num_in_flight + on.num_external)

    def on_released(
        self, request: SlotRequest, *, on: ServerState, num_new_tokens: int | None, seconds: float | None
    ) -> None:
        super().on_released(request, on=on, num_new_tokens=num_new_tokens, seconds=seconds)
        self.speeds.end(
            request.id,
            num_in_flight=on.num_in_flight + on.num_external,
            num_new_tokens=num_new_tokens,
            seconds=seconds,
        )
        if abs(self.speeds.overhead - self._overhead) > RANK_TOLERANCE * self._overhead:
            self._overhead = self.speeds.overhead
            self.epoch += 1
        if self.speeds.epoch != self._speeds_epoch:
            self._speeds_epoch = self.speeds.epoch
            self.epoch += 1

    def on_server_removed(self, server: ServerState) -> None:
        self.speeds.forget(server.name)

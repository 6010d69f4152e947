"""Where a request goes. Pure: no I/O, no clock.

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
"""Share of the newest completion in the running mean of their lengths."""
RANK_TOLERANCE = 0.2
"""The overhead of a step may drift so far before all servers are ranked anew."""
MAX_MARGIN = 1 / 8
"""Of the requests that a server computes at once: the largest escape margin, in completions."""

Rank: TypeAlias = tuple[float, int, int]
Line: TypeAlias = Ranking[tuple[float, int]]
"""Requests that wait: the most urgent first, then the order in which they came."""


@dataclass(frozen=True, slots=True)
class BalancerConfig:
    """How servers are chosen."""

    prefill_cost: float = 0.05
    """Of one prompt token, in decoded tokens: prefill is that much cheaper."""
    escape_margin: float = 8.0
    """A session leaves its server if that has so many completions' worth of work more than another one, beside the
    cost of computing the session's prefix again. At most an eighth of what the server computes at once."""
    expected_tokens: float = 256.0
    """Length of a completion before any has ended."""
    longest_first: bool = False
    """Of the requests that wait, first the one whose trajectory has the most left to do."""


class SlotRequest(Struct, frozen=True):
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


@dataclass(slots=True)
class ServerState:
    """What the balancer knows of a server."""

    name: str
    number: int
    """In the order in which they joined."""
    max_in_flight: float
    given_speed: float = 1.0
    """Relative to the others, beside what is learnt."""
    work: float = 0.0
    num_in_flight: int = 0
    num_outside: int = 0
    """Requests of others than this balancer's, as far as it is known."""
    num_sessions: int = 0
    last_chosen: int = -1
    waiting: Line = field(default_factory=Ranking[tuple[float, int]])
    """Requests whose session lives here."""

    @property
    def has_place(self) -> bool:
        return self.num_in_flight < self.max_in_flight


@dataclass(slots=True)
class SessionState:
    """What the balancer knows of a session."""

    id: str
    server: ServerState | None = None
    num_tokens: int = 0
    """Of its last prompt."""
    num_cached: int = 0
    """Tokens of its context that its server has computed."""


class Policy(ABC):
    """Chooses among servers; the balancer keeps the books."""

    keeps_line: bool = True
    """Requests beyond what a server computes at once wait in the balancer; else they are sent and wait there."""

    def __init__(self, config: BalancerConfig | None = None) -> None:
        self.config = config or BalancerConfig()
        self.mean_tokens = self.config.expected_tokens
        self.epoch = 0
        """Goes up when the ranks of all servers have changed."""

    @abstractmethod
    def rank(self, server: ServerState) -> Rank:
        """The server with the least is the one for a request that may go anywhere."""

    @abstractmethod
    def choose(self, session: SessionState, *, best: ServerState) -> ServerState | None:
        """The server for a session's next request; None if it is to wait for its own server.

        Args:
            best: The one with the least rank, of those that have a place.
        """

    def is_worth_moving(self, session: SessionState, *, home: ServerState, to: ServerState) -> bool:
        """Whether a session whose request waits for its own server is to go to another one."""
        return False

    def work_of(self, request: SlotRequest, *, num_cached: int) -> float:
        """Tokens to decode that a request is expected to be worth."""
        expected = (
            self.mean_tokens if request.max_tokens is None else min(self.mean_tokens, request.max_tokens)
        )
        return expected + self.config.prefill_cost * max(0, request.num_prompt_tokens - num_cached)

    def begun(self, request: SlotRequest, *, on: ServerState) -> None:
        """A request went to a server, whose counts include it."""

    def ended(
        self, request: SlotRequest, *, on: ServerState, num_new_tokens: int | None, seconds: float | None
    ) -> None:
        """A request is done, or failed with no tokens; the server's counts still include it."""
        if num_new_tokens:
            self.mean_tokens += LENGTH_MEMORY * (num_new_tokens - self.mean_tokens)

    def left(self, server: ServerState) -> None:
        """A server is gone, with all that ran on it."""


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
        """Relative to an ordinary server."""
        return server.given_speed * self.speeds.of(server.name)

    def choose(self, session: SessionState, *, best: ServerState) -> ServerState | None:
        home = session.server
        if home is None or home is best or self.is_worth_moving(session, home=home, to=best):
            return best
        return home if home.has_place else None

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

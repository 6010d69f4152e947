"""How fast each server decodes, told from what its completions took. Pure: no I/O, no clock."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field

WINDOW = 32
"""Completions of a server, the newest, that tell how fast it is."""
MIN_COMPLETIONS = 3
"""A server with fewer counts as ordinary; the median of so many is not moved by one that took long."""
FLEET_KEEPS = 1 - 1 / 2048
"""Of what is known of the step of all servers together, with each completion."""
MIN_SPREAD = 0.2
"""Relative spread of the requests in flight from which on the cost of an empty step can be told apart."""
PRIOR_COMPLETIONS = 2.0
"""A server counts as ordinary with the weight of so many completions."""
FORGET_AFTER = 16
"""A server that is given nothing forgets half of what is known of it, each time that the others have completed so many
requests each. In the end it counts as ordinary, is given a request, and is thus measured again."""
MIN_SECONDS = 1e-3
"""Shorter completions tell more about this process than about the server."""
BASE_TOLERANCE = 0.05
"""The pace of an ordinary server may drift so far before all speeds are told anew."""
OVERHEAD_TOLERANCE = 0.2
DEFAULT_OVERHEAD = 32.0
"""Until it can be told apart."""
MAX_OVERHEAD = 256.0
SPEEDS = (0.05, 20.0)
"""Slowest and fastest that a server is taken to be."""
SPEED_STEP = 1.1
"""Speeds are told in steps of this factor: smaller differences are chance, and would break every tie."""


@dataclass(slots=True)
class _Server:
    """Measurements of one server."""

    in_flight_seen: int = 0
    num_seen: int = 0
    num_in_flight: int = 0
    last_used: int = 0
    """How many completions of all servers were timed when it last had a request, or forgot."""
    timed: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Seconds per token and requests in flight of the newest completions."""
    pace: float | None = None
    """Median seconds per token, divided by what the step's overhead and requests explain; None where too little is
    known."""

    def set_pace(self, overhead: float) -> None:
        """Work out the pace anew. Of an even number of completions, the faster one in the middle counts."""
        if len(self.timed) < MIN_COMPLETIONS:
            self.pace = None
        else:
            paces = sorted([seconds / (overhead + in_flight) for seconds, in_flight in self.timed])
            self.pace = paces[(len(paces) - 1) // 2]


@dataclass(slots=True)
class _Fleet:
    """Decaying sums over the completions of all servers, weighted by their tokens: what a straight line needs."""

    tokens: float = 0.0
    token_requests: float = 0.0
    """Tokens times the requests in flight meanwhile."""
    token_requests_squared: float = 0.0
    even_seconds: float = 0.0
    """As if all servers were ordinary ones."""
    even_second_requests: float = 0.0

    def learn(self, num_tokens: int, *, in_flight: float, seconds: float, speed: float) -> None:
        token_requests, even_seconds = num_tokens * in_flight, seconds * speed
        self.tokens = FLEET_KEEPS * self.tokens + num_tokens
        self.token_requests = FLEET_KEEPS * self.token_requests + token_requests
        self.token_requests_squared = FLEET_KEEPS * self.token_requests_squared + token_requests * in_flight
        self.even_seconds = FLEET_KEEPS * self.even_seconds + even_seconds
        self.even_second_requests = FLEET_KEEPS * self.even_second_requests + even_seconds * in_flight

    def overhead(self) -> float | None:
        """Lays a straight line through seconds per token over requests in flight, each completion weighted by its
        tokens and corrected for its server's speed; the overhead is where it meets the axis. None where the requests
        in flight differ too little to tell."""
        tokens = self.tokens
        mean, mean_seconds = self.token_requests / tokens, self.even_seconds / tokens
        variance = self.token_requests_squared / tokens - mean * mean
        if variance < (MIN_SPREAD * mean) ** 2:
            return None
        slope = (self.even_second_requests / tokens - mean_seconds * mean) / variance
        base = mean_seconds - slope * mean
        return min(max(base, 0.0) / slope, MAX_OVERHEAD) if slope > 0 else MAX_OVERHEAD


class SpeedEstimate:
    """A server decodes one token for each request in flight in `(overhead + requests in flight) / speed` units of
    time. The overhead is the servers' in common, the speed each one's own; an ordinary server has speed 1. While there
    is one server only, nothing is learnt of it: there is none to choose."""

    def __init__(self) -> None:
        self.overhead = 0.0
        """What a step costs beside its requests, in requests; 0 before any completion was timed."""
        self.epoch = 0
        """Goes up when speeds of servers have changed that completed nothing."""
        self._servers: defaultdict[str, _Server] = defaultdict(_Server)
        self._begun: dict[str, tuple[str, int, int]] = {}
        self._fleet = _Fleet()
        self._num_timed = 0
        self._base: float | None = None
        """The pace of an ordinary server: the median of all."""
        self._base_overhead = 0.0
        """With which the paces were worked out."""
        self._speeds: dict[str, float] = {}
        """By server; what is missing is to be worked out."""

    def begin(self, request_id: str, *, server: str, num_in_flight: int) -> None:
        """A request went to a server, which has so many by that."""
        known = self._servers[server]
        self._begun[request_id] = (server, known.in_flight_seen, known.num_seen)
        known.in_flight_seen += num_in_flight
        known.num_seen += 1
        known.num_in_flight += 1

    def end(
        self,
        request_id: str,
        *,
        num_in_flight: int,
        num_new_tokens: int | None = None,
        seconds: float | None = None,
    ) -> None:
        """A request has left its server, which had so many until then.

        Args:
            num_new_tokens: None if it failed.
            seconds: From `begin` to the last token; None if nobody measured.
        """
        begun = self._begun.pop(request_id, None)
        if begun is None:
            return
        server, seen_before, num_before = begun
        known = self._servers[server]
        known.in_flight_seen += num_in_flight
        known.num_seen += 1
        known.num_in_flight -= 1
        known.last_used = self._num_timed
        if num_new_tokens and seconds and seconds >= MIN_SECONDS and len(self._servers) > 1:
            in_flight = (known.in_flight_seen - seen_before) / (known.num_seen - num_before)
            self._learn(server, num_new_tokens, in_flight=in_flight, seconds=seconds)

    def forget(self, server: str) -> None:
        """A server is gone, with all that ran on it."""
        self._servers.pop(server, None)
        self._speeds.pop(server, None)
        self._begun = {request: begun for request, begun in self._begun.items() if begun[0] != server}

    def of(self, server: str) -> float:
        """The server's speed, relative to the others."""
        speed = self._speeds.get(server)
        if speed is None:
            speed = self._speeds[server] = self._work_out(self._servers[server])
        return speed

    def _learn(self, server: str, num_tokens: int, *, in_flight: float, seconds: float) -> None:
        known, speed = self._servers[server], self.of(server)
        self._fleet.learn(num_tokens, in_flight=in_flight, seconds=seconds, speed=speed)
        overhead = self._fleet.overhead()
        self.overhead = self.overhead or DEFAULT_OVERHEAD if overhead is None else overhead
        known.timed.append((seconds / num_tokens, in_flight))
        known.set_pace(self._base_overhead or self.overhead)
        self._speeds.pop(server, None)
        self._num_timed += 1
        known.last_used = self._num_timed
        num_servers = len(self._servers)
        if self._num_timed % max(1, num_servers // 4) == 0:
            self._set_base()
        if self._num_timed % num_servers == 0:
            self._forget_idle(num_servers)

    def _set_base(self) -> None:
        """Work out the pace of an ordinary server, and all speeds anew if it has changed."""
        if abs(self.overhead - self._base_overhead) > OVERHEAD_TOLERANCE * self._base_overhead:
            self._base_overhead = self.overhead
            for known in self._servers.values():
                known.set_pace(self.overhead)
            self._base = None
        paces = sorted([known.pace for known in self._servers.values() if known.pace is not None])
        base = paces[(len(paces) - 1) // 2] if paces else None
        if base is None or (self._base and abs(base - self._base) < BASE_TOLERANCE * self._base):
            return
        self._base = base
        self._speeds.clear()
        self.epoch += 1

    def _forget_idle(self, num_servers: int) -> None:
        """Have servers that were given nothing for long forget half of what is known of them."""
        for name, known in self._servers.items():
            is_idle = self._num_timed - known.last_used >= FORGET_AFTER * num_servers
            if is_idle and not known.num_in_flight and len(known.timed) >= MIN_COMPLETIONS:
                for _ in range(len(known.timed) // 2):
                    known.timed.popleft()
                known.set_pace(self._base_overhead)
                known.last_used = self._num_timed
                self._speeds.pop(name, None)
                self.epoch += 1

    def _work_out(self, server: _Server) -> float:
        if server.pace is None or not self._base:
            return 1.0
        share = len(server.timed) / (len(server.timed) + PRIOR_COMPLETIONS)
        speed = (self._base / server.pace) ** share
        slowest, fastest = SPEEDS
        return SPEED_STEP ** round(math.log(min(max(speed, slowest), fastest), SPEED_STEP))

"""How fast each server decodes, told from what its completions took. Pure: no I/O, no clock."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

SERVER_KEEPS = 1 - 1 / 64
"""Of what is known of a server, with each completion of its own."""
FLEET_KEEPS = 1 - 1 / 2048
"""Of what is known of the step of all servers together, with each completion."""
MIN_SPREAD = 0.2
"""Relative spread of the requests in flight from which on the cost of an empty step can be told apart."""
PRIOR_COMPLETIONS = 8.0
"""A server counts as ordinary with the weight of so many completions."""
DEFAULT_OVERHEAD = 32.0
"""Until it can be told apart."""
MAX_OVERHEAD = 256.0
SPEEDS = (0.05, 20.0)
"""Slowest and fastest that a server is taken to be."""
SPEED_STEP = 1.1
"""Speeds are told in steps of this factor: smaller differences are chance, and would break every tie."""


@dataclass(slots=True)
class _Server:
    """Decaying sums over a server's completions, weighted by their tokens."""

    in_flight_seen: int = 0
    num_seen: int = 0
    tokens: float = 0.0
    token_requests: float = 0.0
    """Tokens times the requests in flight meanwhile."""
    seconds: float = 0.0

    def learn(self, num_tokens: int, *, in_flight: float, seconds: float) -> None:
        self.tokens = SERVER_KEEPS * self.tokens + num_tokens
        self.token_requests = SERVER_KEEPS * self.token_requests + num_tokens * in_flight
        self.seconds = SERVER_KEEPS * self.seconds + seconds


@dataclass(slots=True)
class _Fleet:
    """The same over all servers, with what a straight line through them needs."""

    completions: float = 0.0
    tokens: float = 0.0
    token_requests: float = 0.0
    token_requests_squared: float = 0.0
    seconds: float = 0.0
    even_seconds: float = 0.0
    """As if all servers were ordinary ones."""
    even_second_requests: float = 0.0

    def learn(self, num_tokens: int, *, in_flight: float, seconds: float, speed: float) -> None:
        token_requests, even_seconds = num_tokens * in_flight, seconds * speed
        self.completions = FLEET_KEEPS * self.completions + 1
        self.tokens = FLEET_KEEPS * self.tokens + num_tokens
        self.token_requests = FLEET_KEEPS * self.token_requests + token_requests
        self.token_requests_squared = FLEET_KEEPS * self.token_requests_squared + token_requests * in_flight
        self.seconds = FLEET_KEEPS * self.seconds + seconds
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
        self._servers: defaultdict[str, _Server] = defaultdict(_Server)
        self._begun: dict[str, tuple[str, int, int]] = {}
        self._fleet = _Fleet()
        self._speeds: dict[str, float] = {}
        """Worked out since the last completion that was timed."""

    def begin(self, request_id: str, *, server: str, num_in_flight: int) -> None:
        """A request went to a server, which has so many by that."""
        known = self._servers[server]
        self._begun[request_id] = (server, known.in_flight_seen, known.num_seen)
        known.in_flight_seen += num_in_flight
        known.num_seen += 1

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
        if num_new_tokens and seconds and len(self._servers) > 1:
            in_flight = (known.in_flight_seen - seen_before) / (known.num_seen - num_before)
            known.learn(num_new_tokens, in_flight=in_flight, seconds=seconds)
            speed = self._work_out(known)
            self._fleet.learn(num_new_tokens, in_flight=in_flight, seconds=seconds, speed=speed)
            overhead = self._fleet.overhead()
            self.overhead = self.overhead or DEFAULT_OVERHEAD if overhead is None else overhead
            self._speeds.clear()

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

    def _work_out(self, server: _Server) -> float:
        fleet, overhead = self._fleet, self.overhead
        if not server.seconds or not fleet.seconds:
            return 1.0
        seconds_per_work = fleet.seconds / (fleet.tokens * overhead + fleet.token_requests)
        expected = seconds_per_work * (server.tokens * overhead + server.token_requests)
        prior = PRIOR_COMPLETIONS * fleet.seconds / fleet.completions
        slowest, fastest = SPEEDS
        speed = min(max((prior + expected) / (prior + server.seconds), slowest), fastest)
        return SPEED_STEP ** round(math.log(speed, SPEED_STEP))

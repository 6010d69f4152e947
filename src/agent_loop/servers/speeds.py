"""How fast each server decodes, told from what its completions took. Pure: no I/O, no clock."""

from __future__ import annotations

import math
from dataclasses import dataclass

SERVER_MEMORY = 1 / 64
"""Share of the newest completion in what is known of its server."""
FLEET_MEMORY = 1 / 2048
"""Share of the newest completion in what is known of the step of all servers together."""
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
class _Record:
    """Decaying sums over a server's completions, weighted by their tokens."""

    in_flight_seen: int = 0
    num_seen: int = 0
    tokens: float = 0.0
    token_requests: float = 0.0
    """Tokens times the requests in flight meanwhile."""
    seconds: float = 0.0


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


class SpeedEstimate:
    """A server decodes one token for each request in flight in `(overhead + requests in flight) / speed` units of
    time. The overhead is the servers' in common, the speed each one's own; an ordinary server has speed 1."""

    def __init__(self) -> None:
        self.overhead = 0.0
        """What a step costs beside its requests, in requests; 0 before any completion was timed."""
        self._records: dict[str, _Record] = {}
        self._begun: dict[str, tuple[str, int, int]] = {}
        self._fleet = _Fleet()

    def begin(self, request_id: str, *, server: str, num_in_flight: int) -> None:
        """A request went to a server, which has so many by that."""
        record = self._see(server, num_in_flight)
        self._begun[request_id] = (server, record.in_flight_seen - num_in_flight, record.num_seen - 1)

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
        record = self._see(server, num_in_flight)
        if not num_new_tokens or not seconds:
            return
        in_flight = (record.in_flight_seen - seen_before) / (record.num_seen - num_before)
        _decay(record, SERVER_MEMORY)
        record.tokens += num_new_tokens
        record.token_requests += num_new_tokens * in_flight
        record.seconds += seconds
        self._learn_step(num_new_tokens, in_flight=in_flight, seconds=seconds, speed=self.of(server))

    def forget(self, server: str) -> None:
        """A server is gone, with all that ran on it."""
        self._records.pop(server, None)
        self._begun = {request: begun for request, begun in self._begun.items() if begun[0] != server}

    def of(self, server: str) -> float:
        """The server's speed, relative to the others."""
        record, fleet = self._records.get(server), self._fleet
        if record is None or not record.seconds or not fleet.seconds:
            return 1.0
        fleet_work = fleet.tokens * self.overhead + fleet.token_requests
        seconds_per_work = fleet.seconds / fleet_work
        expected = seconds_per_work * (record.tokens * self.overhead + record.token_requests)
        prior = PRIOR_COMPLETIONS * fleet.seconds / fleet.completions
        slowest, fastest = SPEEDS
        speed = min(max((prior + expected) / (prior + record.seconds), slowest), fastest)
        return SPEED_STEP ** round(math.log(speed, SPEED_STEP))

    def _see(self, server: str, num_in_flight: int) -> _Record:
        record = self._records.setdefault(server, _Record())
        record.in_flight_seen += num_in_flight
        record.num_seen += 1
        return record

    def _learn_step(self, num_tokens: int, *, in_flight: float, seconds: float, speed: float) -> None:
        """Lays a straight line through seconds per token over requests in flight, each completion weighted by its
        tokens and corrected for its server's speed; the overhead is where it meets the axis."""
        fleet = self._fleet
        _decay(fleet, FLEET_MEMORY)
        fleet.completions += 1
        fleet.tokens += num_tokens
        fleet.token_requests += num_tokens * in_flight
        fleet.token_requests_squared += num_tokens * in_flight * in_flight
        fleet.seconds += seconds
        fleet.even_seconds += seconds * speed
        fleet.even_second_requests += seconds * speed * in_flight
        mean = fleet.token_requests / fleet.tokens
        mean_seconds = fleet.even_seconds / fleet.tokens
        variance = fleet.token_requests_squared / fleet.tokens - mean * mean
        if variance < (MIN_SPREAD * mean) ** 2:
            self.overhead = self.overhead or DEFAULT_OVERHEAD
            return
        slope = (fleet.even_second_requests / fleet.tokens - mean_seconds * mean) / variance
        base = mean_seconds - slope * mean
        self.overhead = min(max(base, 0.0) / slope, MAX_OVERHEAD) if slope > 0 else MAX_OVERHEAD


def _decay(record: _Record | _Fleet, memory: float) -> None:
    keep = 1 - memory
    record.tokens *= keep
    record.token_requests *= keep
    record.seconds *= keep
    if isinstance(record, _Fleet):
        record.completions *= keep
        record.token_requests_squared *= keep
        record.even_seconds *= keep
        record.even_second_requests *= keep

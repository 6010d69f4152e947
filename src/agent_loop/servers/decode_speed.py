"""Relative decode speed of each server, estimated from the durations of its completions. Pure: no I/O, no clock."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field

WINDOW = 32
"""Number of newest completions of a server from which its speed is estimated."""
MIN_COMPLETIONS = 3
"""Completions that a server needs for an estimate. With fewer, it has speed 1. One slow completion does not change
the median of this many."""
STEP_DECAY = 1 - 1 / 2048
"""Decay of the sums over all servers, per completion."""
MIN_SPREAD = 0.2
"""Least relative spread of the in-flight counts at which the overhead of a step is estimated."""
PRIOR_COMPLETIONS = 2.0
"""Weight of the prior that a server has speed 1, in completions."""
FORGET_AFTER = 16
"""Number of completions per server after which an idle server forgets half of its measurements. Its speed returns to 1
in the end, so that it gets a request and is measured again."""
MIN_SECONDS = 1e-3
"""Completions shorter than this are ignored: they measure this process more than the server."""
BASE_TOLERANCE = 0.05
"""Relative change of the median pace after which all speeds are computed again."""
OVERHEAD_TOLERANCE = 0.2
"""Relative change of the overhead after which all paces are computed again."""
DEFAULT_OVERHEAD = 32.0
"""Overhead of a step, in requests, until it can be estimated."""
MAX_OVERHEAD = 256.0
SPEED_RANGE = (0.05, 20.0)
"""Lowest and highest relative speed."""
SPEED_STEP = 1.1
"""Speeds are rounded to powers of this factor. Smaller differences are noise, and would break every tie."""


@dataclass(slots=True)
class _ServerTimings:
    """Durations of the completions of one server."""

    in_flight_seen: int = 0
    """Sum of the in-flight counts, one count for each begin and end of a request."""
    num_seen: int = 0
    """Number of counts in `in_flight_seen`."""
    num_in_flight: int = 0
    last_used: int = 0
    """Number of completions of all servers that had been timed when the server last had a request or forgot."""
    timed: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Seconds per token and in-flight requests of the newest completions."""
    pace: float | None = None
    """Median of seconds per token divided by (overhead + in-flight requests); None if there are too few completions."""

    def set_pace(self, overhead: float) -> None:
        """Compute the pace: the lower median of the completions."""
        if len(self.timed) < MIN_COMPLETIONS:
            self.pace = None
        else:
            paces = sorted([seconds / (overhead + in_flight) for seconds, in_flight in self.timed])
            self.pace = paces[(len(paces) - 1) // 2]


@dataclass(slots=True)
class _StepTimeFit:
    """Linear fit of seconds per token over in-flight requests, from decaying sums over the completions of all servers.

    Each completion is weighted by its number of tokens and corrected for the speed of its server.
    """

    tokens: float = 0.0
    token_requests: float = 0.0
    """Sum of tokens times in-flight requests."""
    token_requests_squared: float = 0.0
    scaled_seconds: float = 0.0
    """Sum of seconds times the speed of the server."""
    scaled_second_requests: float = 0.0

    def add(self, num_tokens: int, *, in_flight: float, seconds: float, speed: float) -> None:
        """Add a completion."""
        token_requests, scaled_seconds = num_tokens * in_flight, seconds * speed
        self.tokens = STEP_DECAY * self.tokens + num_tokens
        self.token_requests = STEP_DECAY * self.token_requests + token_requests
        self.token_requests_squared = STEP_DECAY * self.token_requests_squared + token_requests * in_flight
        self.scaled_seconds = STEP_DECAY * self.scaled_seconds + scaled_seconds
        self.scaled_second_requests = STEP_DECAY * self.scaled_second_requests + scaled_seconds * in_flight

    def overhead(self) -> float | None:
        """Return the overhead of a step, in requests: intercept divided by slope of the fit.

        Returns None if the in-flight counts differ too little for a fit.
        """
        tokens = self.tokens
        mean, mean_seconds = self.token_requests / tokens, self.scaled_seconds / tokens
        variance = self.token_requests_squared / tokens - mean * mean
        if variance < (MIN_SPREAD * mean) ** 2:
            return None
        slope = (self.scaled_second_requests / tokens - mean_seconds * mean) / variance
        base = mean_seconds - slope * mean
        return min(max(base, 0.0) / slope, MAX_OVERHEAD) if slope > 0 else MAX_OVERHEAD


class DecodeSpeedEstimator:
    """Estimator of the relative decode speed of servers.

    The model: a server decodes one token for each in-flight request in `(overhead + in-flight requests) / speed` units
    of time. The overhead is common to all servers, the speed is specific to one; a median server has speed 1. Nothing
    is estimated while there is only one server.
    """

    def __init__(self) -> None:
        self.overhead = 0.0
        """Fixed cost of a decoding step, in requests; 0 before any completion was timed."""
        self.epoch = 0
        """Counter that increases when the speeds of other servers than the completing one have changed."""
        self._servers: defaultdict[str, _ServerTimings] = defaultdict(_ServerTimings)
        self._begun: dict[str, tuple[str, int, int]] = {}
        """Server of each running request, and its `in_flight_seen` and `num_seen` when the request began."""
        self._step_time = _StepTimeFit()
        self._num_timed = 0
        self._base: float | None = None
        """Median pace of all servers."""
        self._base_overhead = 0.0
        """Overhead with which the paces were computed."""
        self._speeds: dict[str, float] = {}
        """Cached speeds by server; missing entries are computed when needed."""

    def begin(self, request_id: str, *, server: str, num_in_flight: int) -> None:
        """Note that a server got a request.

        Args:
            num_in_flight: In-flight requests of the server, this one included.
        """
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
        """Note that a server finished a request.

        Args:
            num_in_flight: In-flight requests of the server, this one included.
            num_new_tokens: Number of sampled tokens; None if the request failed.
            seconds: Seconds from `begin` to the last token; None if not measured.
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
        """Remove a server and all its requests."""
        self._servers.pop(server, None)
        self._speeds.pop(server, None)
        self._begun = {request: begun for request, begun in self._begun.items() if begun[0] != server}

    def speed_of(self, server: str) -> float:
        """Return the decode speed of a server, relative to the median server."""
        speed = self._speeds.get(server)
        if speed is None:
            speed = self._speeds[server] = self._estimate(self._servers[server])
        return speed

    def _learn(self, server: str, num_tokens: int, *, in_flight: float, seconds: float) -> None:
        known, speed = self._servers[server], self.speed_of(server)
        self._step_time.add(num_tokens, in_flight=in_flight, seconds=seconds, speed=speed)
        overhead = self._step_time.overhead()
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
        """Update the median pace. Discard all speeds if the median has changed."""
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
        """Discard half of the measurements of servers that have been idle for long."""
        for name, known in self._servers.items():
            is_idle = self._num_timed - known.last_used >= FORGET_AFTER * num_servers
            if is_idle and not known.num_in_flight and len(known.timed) >= MIN_COMPLETIONS:
                for _ in range(len(known.timed) // 2):
                    known.timed.popleft()
                known.set_pace(self._base_overhead)
                known.last_used = self._num_timed
                self._speeds.pop(name, None)
                self.epoch += 1

    def _estimate(self, server: _ServerTimings) -> float:
        if server.pace is None or not self._base:
            return 1.0
        share = len(server.timed) / (len(server.timed) + PRIOR_COMPLETIONS)
        speed = (self._base / server.pace) ** share
        slowest, fastest = SPEED_RANGE
        return SPEED_STEP ** round(math.log(min(max(speed, slowest), fastest), SPEED_STEP))

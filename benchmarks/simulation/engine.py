"""Queueing model of an inference engine with continuous batching. Pure: the caller passes the time.

All decoding requests get one token per step. A request is done when the step counter has grown by its length, so that
no work is done per token. Prompts are prefilled one after another, and decoding stops during a prefill.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field, replace

TIME_TOLERANCE_S = 1e-7
"""An event that is due within this time counts as due."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Speed and capacity of an engine.

    The defaults are of the order of one GPU with a model of about eight billion parameters and long contexts.
    """

    step_s: float = 0.012
    """Fixed seconds of a decoding step: reading the weights and launching kernels."""
    step_s_per_request: float = 0.00025
    """Seconds that each request adds to a decoding step."""
    prefill_tokens_per_s: float = 20_000.0
    max_concurrent: int = 64
    """Largest number of requests in the batch; others are queued."""
    kv_tokens: int = 400_000
    """Capacity of the KV cache in tokens, for running requests and for sessions between two turns."""
    speed: float = 1.0
    """Factor that divides all times above."""

    @property
    def best_tokens_per_s(self) -> float:
        """Decoded tokens per second with a full batch."""
        return self.speed / (self.step_s / self.max_concurrent + self.step_s_per_request)

    def scaled(self, servers: float) -> EngineModel:
        """Return an engine with the capacity of several servers.

        Each request is as fast as if the load were spread evenly over the servers.
        """
        return replace(
            self,
            step_s_per_request=self.step_s_per_request / servers,
            prefill_tokens_per_s=self.prefill_tokens_per_s * servers,
            max_concurrent=round(self.max_concurrent * servers),
            kv_tokens=round(self.kv_tokens * servers),
        )


@dataclass(slots=True)
class SimulatedRequest:
    """Request in a simulated engine."""

    id: str
    session: str
    num_prompt_tokens: int
    num_tokens: int
    """Number of tokens to decode."""
    order: int
    num_done: int = 0
    """Number of decoded tokens."""
    num_cached: int = 0
    """Prompt tokens that were found in the prefix cache."""
    num_preempted: int = 0
    submitted_at: float = 0.0
    first_token_after_s: float | None = None
    """Seconds from submission to the first token; None until decoding starts."""
    prefill_s: float = 0.0
    """Seconds of prefill left."""
    size: int = 0
    """Context tokens when the request joined the batch."""
    decode_started_at: float = 0.0
    """Step counter when decoding began."""
    decode_ends_at: float = 0.0
    """Step counter at which decoding ends."""


@dataclass(slots=True)
class SimulatedEngine:
    """State of one simulated engine."""

    model: EngineModel
    now: float = 0.0
    steps: float = 0.0
    _decoding: dict[str, SimulatedRequest] = field(default_factory=dict[str, SimulatedRequest])
    _ends: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    """Heap of the ends of decoding requests. Entries of other requests are stale."""
    _prefills: deque[SimulatedRequest] = field(default_factory=deque[SimulatedRequest])
    _waiting: deque[SimulatedRequest] = field(default_factory=deque[SimulatedRequest])
    _kv_fixed: float = 0.0
    """Cached tokens of running requests, less `steps` for each decoding request."""
    _sessions: dict[str, int] = field(default_factory=dict[str, int])
    """Cached tokens of sessions between two turns, least recently used first."""
    _kv_sessions: int = 0
    _order: int = 0

    @property
    def num_running(self) -> int:
        return len(self._decoding) + len(self._prefills)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_running(self) -> float:
        """Cached tokens of running requests."""
        return self._kv_fixed + len(self._decoding) * self.steps

    @property
    def kv_sessions(self) -> int:
        """Cached tokens of sessions between two turns."""
        return self._kv_sessions

    def submit(self, request_id: str, *, session: str, num_prompt_tokens: int, num_tokens: int) -> None:
        """Add a request at the current time `now`. A request that outgrows the cache ends early."""
        self._order += 1
        running = SimulatedRequest(
            request_id, session, num_prompt_tokens, num_tokens, self._order, submitted_at=self.now
        )
        self._waiting.append(running)
        self._admit()

    def remove(self, request_id: str) -> SimulatedRequest | None:
        """Remove a request and return it with its progress; None if it is unknown."""
        running = self._decoding.pop(request_id, None)
        if running is not None:
            self._remove_from_batch(running)
            self._admit()
            return running
        for queue in (self._prefills, self._waiting):
            running = next((each for each in queue if each.id == request_id), None)
            if running is not None:
                queue.remove(running)
                self._kv_fixed -= running.size if queue is self._prefills else 0
                self._admit()
                return running
        return None

    def next_event(self) -> float:
        """Return the time of the next event; infinity if nothing runs."""
        if self._prefills:
            return self.now + self._prefills[0].prefill_s
        if not self._decoding:
            return math.inf
        return self.now + (self._next_stop() - self.steps) * self._step_s()

    def advance(self, now: float) -> list[SimulatedRequest]:
        """Advance to a time and return the requests that ended by then, oldest first."""
        ended: list[SimulatedRequest] = []
        while (due := self.next_event()) <= now + TIME_TOLERANCE_S:
            self._add_time(max(due - self.now, 0.0))
            if self._prefills:
                self._begin_decoding(self._prefills.popleft())
                continue
            self.steps = self._next_stop()
            ended += self._end_due() or self._preempt_youngest()
            self._admit()
        elapsed = now - self.now
        if elapsed > 0:
            if self._prefills:
                self._prefills[0].prefill_s -= elapsed
            elif self._decoding:
                self.steps += elapsed / self._step_s()
            self._add_time(elapsed)
        return ended

    def _add_time(self, seconds: float) -> None:
        self.now += seconds

    def _step_s(self) -> float:
        model = self.model
        return (model.step_s + model.step_s_per_request * len(self._decoding)) / model.speed

    def _next_stop(self) -> float:
        """Return the step counter at which a request ends or the cache is full."""
        full = (self.model.kv_tokens - self._kv_fixed) / len(self._decoding)
        return max(min(self._first_end(), full), self.steps)

    def _first_end(self) -> float:
        while self._ends:
            end, request_id = self._ends[0]
            running = self._decoding.get(request_id)
            if running is not None and running.decode_ends_at == end:
                return end
            heapq.heappop(self._ends)
        return math.inf

    def _begin_decoding(self, running: SimulatedRequest) -> None:
        running.decode_started_at = self.steps
        if running.first_token_after_s is None:
            running.first_token_after_s = self.now + self._step_s() - running.submitted_at
        running.decode_ends_at = self.steps + running.num_tokens - running.num_done
        self._kv_fixed -= self.steps
        self._decoding[running.id] = running
        heapq.heappush(self._ends, (running.decode_ends_at, running.id))

    def _end_due(self) -> list[SimulatedRequest]:
        ended: list[SimulatedRequest] = []
        while self._first_end() <= self.steps + TIME_TOLERANCE_S:
            running = self._decoding.pop(heapq.heappop(self._ends)[1])
            self._remove_from_batch(running)
            running.num_done = running.num_tokens
            ended.append(running)
        return ended

    def _decoded(self, running: SimulatedRequest) -> int:
        """Return the number of tokens that a request decoded since it joined the batch."""
        return int(self.steps - running.decode_started_at + TIME_TOLERANCE_S)

    def _remove_from_batch(self, running: SimulatedRequest) -> None:
        """Stop decoding a request. Its context stays cached for its session."""
        decoded = self._decoded(running)
        running.num_done += decoded
        self._kv_fixed -= running.size - running.decode_started_at
        self._cache_session(running.session, running.size + decoded)

    def _preempt_youngest(self) -> list[SimulatedRequest]:
        """Preempt the newest request when running requests fill the cache. It is queued again and recomputed.

        A request that runs alone has outgrown the cache. It ends and is returned.
        """
        youngest = max(self._decoding.values(), key=lambda running: running.order)
        del self._decoding[youngest.id]
        self._remove_from_batch(youngest)
        self._kv_sessions -= self._sessions.pop(youngest.session, 0)
        if not self.num_running:
            return [youngest]
        youngest.num_preempted += 1
        self._waiting.appendleft(youngest)
        return []

    def _admit(self) -> None:
        """Move queued requests into the batch as far as the cache allows."""
        self._drop_oldest_sessions()
        while self._waiting and self.num_running < self.model.max_concurrent:
            first = self._waiting[0]
            size = first.num_prompt_tokens + first.num_done
            if self.num_running and self.kv_running + size + self.num_running >= self.model.kv_tokens:
                return
            self._waiting.popleft()
            cached = self._sessions.pop(first.session, 0)
            self._kv_sessions -= cached
            reused = min(cached, size - 1)
            first.num_cached = min(reused, first.num_prompt_tokens)
            first.size = size
            first.prefill_s = (size - reused) / (self.model.prefill_tokens_per_s * self.model.speed)
            self._kv_fixed += size
            self._prefills.append(first)
            self._drop_oldest_sessions()

    def _cache_session(self, session: str, num_tokens: int) -> None:
        self._kv_sessions += num_tokens - self._sessions.pop(session, 0)
        self._sessions[session] = num_tokens

    def _drop_oldest_sessions(self) -> None:
        """Evict tokens of the least recently used sessions, from their ends, to make room for running requests."""
        lacking = math.ceil(self.kv_running + self._kv_sessions - self.model.kv_tokens)
        while lacking > 0 and self._sessions:
            session = next(iter(self._sessions))
            held = self._sessions[session]
            dropped = min(held, lacking)
            lacking -= dropped
            self._kv_sessions -= dropped
            if dropped < held:
                self._sessions[session] = held - dropped
            else:
                del self._sessions[session]

"""An inference engine with continuous batching, as a queueing model. Pure: whoever calls it says what time it is.

All requests that decode get one token per step, so that a request is done when the count of steps has grown by its
length: nothing happens per token. Prompts are computed one after another, and decoding stands still meanwhile.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field, replace

TIME_TOLERANCE_S = 1e-7
"""What is due so soon is due."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """How fast an engine is and how much it holds. The defaults are of the order of one GPU with a model of some eight
    billion parameters on long contexts."""

    step_s: float = 0.012
    """A decoding step beside its requests: weights are read, kernels launched."""
    step_s_per_request: float = 0.00025
    """What each request adds to a step."""
    prefill_tokens_per_s: float = 20_000.0
    max_concurrent: int = 64
    """Requests in the batch; more wait."""
    kv_tokens: int = 400_000
    """Tokens that the KV cache holds, of running requests and of sessions between two turns."""
    speed: float = 1.0
    """Everything takes 1 / speed of the above."""

    @property
    def best_tokens_per_s(self) -> float:
        """Of a full batch."""
        return self.speed / (self.step_s / self.max_concurrent + self.step_s_per_request)

    def enlarged(self, servers: float) -> EngineModel:
        """One engine with the capacity of so many: each request is as fast as if all were spread evenly."""
        return replace(
            self,
            step_s_per_request=self.step_s_per_request / servers,
            prefill_tokens_per_s=self.prefill_tokens_per_s * servers,
            max_concurrent=round(self.max_concurrent * servers),
            kv_tokens=round(self.kv_tokens * servers),
        )


@dataclass(slots=True)
class Running:
    """A request in the engine."""

    id: str
    session: str
    num_prompt_tokens: int
    num_tokens: int
    """To decode."""
    order: int
    num_done: int = 0
    """Decoded."""
    num_cached: int = 0
    """Prompt tokens that it did not have to compute."""
    num_preempted: int = 0
    asked_at: float = 0.0
    first_token_after_s: float | None = None
    """Since it was asked for; None until it first decodes."""
    prefill_s: float = 0.0
    """Left until it decodes."""
    size: int = 0
    """Tokens of its context when it joined the batch."""
    begun_at: float = 0.0
    """The count of steps when it began to decode."""
    ends_at: float = 0.0
    """The count of steps at which it ends."""


@dataclass(slots=True)
class Engine:
    """The state of one engine."""

    model: EngineModel
    now: float = 0.0
    busy_s: float = 0.0
    steps: float = 0.0
    _decoding: dict[str, Running] = field(default_factory=dict[str, Running])
    _ends: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    """When each that decodes ends; entries of others are stale."""
    _prefills: deque[Running] = field(default_factory=deque[Running])
    _waiting: deque[Running] = field(default_factory=deque[Running])
    _kv_fixed: float = 0.0
    """Tokens in the cache of running requests, less `steps` for each that decodes."""
    _sessions: dict[str, int] = field(default_factory=dict[str, int])
    """Cached tokens of sessions between two turns, the one that was used longest ago first."""
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
        """Tokens in the cache that running requests need."""
        return self._kv_fixed + len(self._decoding) * self.steps

    @property
    def kv_sessions(self) -> int:
        """Tokens in the cache of sessions between two turns."""
        return self._kv_sessions

    def submit(self, request_id: str, *, session: str, num_prompt_tokens: int, num_tokens: int) -> None:
        """Takes a request, at the time to which it was advanced. One that outgrows the cache ends there."""
        self._order += 1
        running = Running(request_id, session, num_prompt_tokens, num_tokens, self._order, asked_at=self.now)
        self._waiting.append(running)
        self._admit()

    def withdraw(self, request_id: str) -> Running | None:
        """Takes a request out, with what it has done."""
        running = self._decoding.pop(request_id, None)
        if running is not None:
            self._leave_batch(running)
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

    def empty(self) -> list[Running]:
        """Loses everything; returns what ran or waited."""
        for running in self._decoding.values():
            running.num_done += self._decoded(running)
        lost = [*self._decoding.values(), *self._prefills, *self._waiting]
        for held in (self._decoding, self._ends, self._prefills, self._waiting, self._sessions):
            held.clear()
        self._kv_fixed, self._kv_sessions = 0.0, 0
        return lost

    def next_event(self) -> float:
        """When something changes by itself; infinite if nothing runs."""
        if self._prefills:
            return self.now + self._prefills[0].prefill_s
        if not self._decoding:
            return math.inf
        return self.now + (self._next_stop() - self.steps) * self._step_s()

    def advance(self, now: float) -> list[Running]:
        """Goes on to a time; returns the requests that ended by then, in order."""
        ended: list[Running] = []
        while (due := self.next_event()) <= now + TIME_TOLERANCE_S:
            self._pass(max(due - self.now, 0.0))
            if self._prefills:
                self._begin_decoding(self._prefills.popleft())
                continue
            self.steps = self._next_stop()
            ended += self._end_due() or self._set_aside_youngest()
            self._admit()
        elapsed = now - self.now
        if elapsed > 0:
            if self._prefills:
                self._prefills[0].prefill_s -= elapsed
            elif self._decoding:
                self.steps += elapsed / self._step_s()
            self._pass(elapsed)
        return ended

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        if self._prefills or self._decoding:
            self.busy_s += seconds

    def _step_s(self) -> float:
        model = self.model
        return (model.step_s + model.step_s_per_request * len(self._decoding)) / model.speed

    def _next_stop(self) -> float:
        """The count of steps at which a request ends or the cache is full."""
        full = (self.model.kv_tokens - self._kv_fixed) / len(self._decoding)
        return max(min(self._first_end(), full), self.steps)

    def _first_end(self) -> float:
        while self._ends:
            end, request_id = self._ends[0]
            running = self._decoding.get(request_id)
            if running is not None and running.ends_at == end:
                return end
            heapq.heappop(self._ends)
        return math.inf

    def _begin_decoding(self, running: Running) -> None:
        running.begun_at = self.steps
        if running.first_token_after_s is None:
            running.first_token_after_s = self.now + self._step_s() - running.asked_at
        running.ends_at = self.steps + running.num_tokens - running.num_done
        self._kv_fixed -= self.steps
        self._decoding[running.id] = running
        heapq.heappush(self._ends, (running.ends_at, running.id))

    def _end_due(self) -> list[Running]:
        ended: list[Running] = []
        while self._first_end() <= self.steps + TIME_TOLERANCE_S:
            running = self._decoding.pop(heapq.heappop(self._ends)[1])
            self._leave_batch(running)
            running.num_done = running.num_tokens
            ended.append(running)
        return ended

    def _decoded(self, running: Running) -> int:
        """Tokens since it joined the batch."""
        return int(self.steps - running.begun_at + TIME_TOLERANCE_S)

    def _leave_batch(self, running: Running) -> None:
        """A request decodes no longer; its context stays cached for its session."""
        decoded = self._decoded(running)
        running.num_done += decoded
        self._kv_fixed -= running.size - running.begun_at
        self._keep(running.session, running.size + decoded)

    def _set_aside_youngest(self) -> list[Running]:
        """The cache is full of running requests: the one that came last waits again and is computed anew. One that
        runs alone has outgrown the cache, ends, and is returned."""
        youngest = max(self._decoding.values(), key=lambda running: running.order)
        del self._decoding[youngest.id]
        self._leave_batch(youngest)
        self._kv_sessions -= self._sessions.pop(youngest.session, 0)
        if not self.num_running:
            return [youngest]
        youngest.num_preempted += 1
        self._waiting.appendleft(youngest)
        return []

    def _admit(self) -> None:
        """Fills the batch from the queue as far as the cache allows."""
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

    def _keep(self, session: str, num_tokens: int) -> None:
        self._kv_sessions += num_tokens - self._sessions.pop(session, 0)
        self._sessions[session] = num_tokens

    def _drop_oldest_sessions(self) -> None:
        """Gives the room of the sessions that were used longest ago to those that run, from their ends."""
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

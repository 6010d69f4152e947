"""The engine proper: admits requests to slots, runs steps, applies control calls between them.

Consumes requests, waits for nothing, produces outcomes. One thread owns it; it knows of none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from agent_loop.errors import ServerError
from agent_loop.seeds import derived_seed
from agent_loop.servers.embedded.computation import Computation
from agent_loop.servers.embedded.config import EmbeddedConfig
from agent_loop.servers.embedded.request import GenerationRequest
from agent_loop.servers.embedded.runner import ModelRunner
from agent_loop.servers.embedded.sampling import SampledRow, sample_rows
from agent_loop.servers.embedded.vision import FeaturesError
from agent_loop.servers.embedded.weights import load_weights
from agent_loop.types import ServerStopReason, TokenOutput

Outcome: TypeAlias = TokenOutput | ServerError


@dataclass(slots=True)
class EngineStats:
    """Counters since the start."""

    steps: int = 0
    """Forwards of the model."""
    prefilled_tokens: int = 0
    """Prompt tokens that were computed."""
    reused_tokens: int = 0
    """Prompt tokens that were found in the cache, in place or copied from another slot."""
    decoded_tokens: int = 0
    """Tokens that were sampled."""


class Engine:
    """Continuous batching of requests over a computation. Requests beyond its room are queued."""

    def __init__(
        self, runner: ModelRunner, computation: Computation, *, config: EmbeddedConfig, server: str
    ) -> None:
        self.weight_version = 0
        self.stats = EngineStats()
        self.computation = computation
        self._runner = runner
        self._config = config
        self._server = server
        self._is_asleep = False
        self._num_unseeded = 0
        """Requests that came without a seed."""
        self._waiting: deque[GenerationRequest] = deque()
        self._running: dict[GenerationRequest, None] = {}
        """In the order of their admission."""
        self._finished: list[tuple[GenerationRequest, Outcome]] = []
        self._sessions: set[str] = set()
        """Of all requests that wait or run."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_slots(self) -> int:
        return self._config.max_slots

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def cache_bytes(self) -> int:
        """Memory of the KV cache; 0 while asleep."""
        return self.computation.num_bytes

    def submit(self, request: GenerationRequest) -> None:
        """Puts a request in line.

        Raises:
            ServerError: The engine is asleep, or the session already has a request.
        """
        if self._is_asleep:
            raise self._error("the server is asleep; call wake_up first", request)
        if request.request_id in self._sessions:
            raise self._error(
                "a completion of this session is still running; await or abort it first", request
            )
        if request.seed is None:
            request.seed = derived_seed(self._config.seed, self._num_unseeded)
            self._num_unseeded += 1
        self._sessions.add(request.request_id)
        self._waiting.append(request)

    def abort(self, request: GenerationRequest) -> None:
        """Ends a request with what it has; does nothing if it has ended already."""
        if request in self._waiting:
            self._waiting.remove(request)
            self._finish(request, "aborted")
        elif request in self._running:
            self._finish(request, "aborted")

    def abort_session(self, request_id: str) -> None:
        for request in self._requests():
            if request.request_id == request_id:
                self.abort(request)

    def end_session(self, request_id: str) -> None:
        self.computation.end_session(request_id)

    def step(self) -> None:
        """Compute the next tokens of everything that is ready for it."""
        self._admit()
        if not self._running:
            return
        output = self.computation.step()
        self.stats.steps += output.num_forwards
        self.stats.prefilled_tokens += output.num_prompt_tokens
        self._sample(output.requests, logits=output.logits)

    def take_finished(self) -> list[tuple[GenerationRequest, Outcome]]:
        """Hands over the requests that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def update_weights(self, weights: Mapping[str, Tensor], *, weight_version: int) -> None:
        """Raises: WeightsError: They do not fit; nothing was changed."""
        load_weights(self._runner.model, weights)
        self.weight_version = weight_version
        self.computation.forget_idle()
        for request in list(self._running):
            if self._config.recompute_kv_on_update:
                self._restart(request)
            else:
                self.computation.mark_stale(request)

    def sleep(self) -> None:
        """Raises: ServerError: Requests are still in the engine."""
        if self.has_work:
            raise ServerError(
                f"{self.num_running} requests run and {self.num_waiting} wait; await or abort them before sleep",
                server=self._server,
            )
        self._is_asleep = True
        self.computation.free()
        self._runner.offload()

    def wake_up(self) -> None:
        if self._is_asleep:
            self._runner.load()
            self.computation.allocate()
            self._is_asleep = False

    def release(self) -> None:
        """Free the cache for good and hand the model back."""
        for request in self._running:
            self.computation.release(request, discard=True)
        self._waiting.clear()
        self._running.clear()
        self.computation.free()
        self._sessions.clear()
        self._runner.hand_back()

    def _requests(self) -> Iterable[GenerationRequest]:
        return (*self._running, *self._waiting)

    def _admit(self) -> None:
        """Start queued requests. One that can copy a prefix still being computed waits for it; the others pass it."""
        held: list[GenerationRequest] = []
        while self._waiting and self.computation.has_room:
            request = self._waiting.popleft()
            if not self._start(request):
                held.append(request)
        self._waiting.extendleft(reversed(held))

    def _start(self, request: GenerationRequest) -> bool:
        try:
            if not self.computation.admit(request):
                return False
        except FeaturesError as error:
            self._finish(request, self._error(str(error), request))
            return True
        self.stats.reused_tokens += request.num_cached_tokens
        self._running[request] = None
        return True

    def _restart(self, request: GenerationRequest) -> None:
        request.num_preempted += 1
        try:
            self.computation.restart(request)
        except FeaturesError as error:
            self._finish(request, self._error(str(error), request))

    def _sample(self, requests: Sequence[GenerationRequest], *, logits: Tensor) -> None:
        if not requests:
            return
        params, uniforms = [r.params for r in requests], [r.draw() for r in requests]
        num_at_once = 1 if self._config.deterministic else len(requests)
        rows: list[SampledRow] = []
        for start in range(0, len(requests), num_at_once):
            part = slice(start, start + num_at_once)
            rows += sample_rows(logits[part], params=params[part], uniforms=uniforms[part])
        for request, row in zip(requests, rows, strict=True):
            self._accept(request, row=row)

    def _accept(self, request: GenerationRequest, *, row: SampledRow) -> None:
        if not row.is_finite:
            num_tokens = len(request.prompt_ids) + len(request.token_ids)
            error = self._error(
                f"the model's logits are NaN or infinite after {num_tokens} tokens; check the published weights "
                f"(version {self.weight_version}), or use float32 instead of a shorter type",
                request,
            )
            self._finish(request, error)
            return
        self.stats.decoded_tokens += 1
        self.computation.append(request, row.token_id)
        reason = request.append(
            row.token_id, row.logprob, weight_version=self.weight_version, extras=row.extras
        )
        if reason is not None:
            self._finish(request, reason)

    def _finish(self, request: GenerationRequest, how: ServerStopReason | ServerError) -> None:
        self._running.pop(request, None)
        self.computation.release(request, discard=isinstance(how, ServerError))
        self._sessions.discard(request.request_id)
        outcome = (
            how if isinstance(how, ServerError) else request.output(how, weight_version=self.weight_version)
        )
        self._finished.append((request, outcome))

    def _error(self, message: str, request: GenerationRequest) -> ServerError:
        return ServerError(message, server=self._server, request_id=request.request_id)

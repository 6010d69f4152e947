"""The engine proper: admits requests to slots, runs steps, applies control calls between them.

Consumes requests, waits for nothing, produces outcomes. One thread owns it; it knows of none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from torch import Tensor

from agent_loop.errors import ServerError
from agent_loop.servers.embedded.batch import StepBatch, pack_step
from agent_loop.servers.embedded.cache import KVCache
from agent_loop.servers.embedded.config import EmbeddedConfig
from agent_loop.servers.embedded.request import GenerationRequest
from agent_loop.servers.embedded.runner import ModelRunner
from agent_loop.servers.embedded.sampling import SampledRow, sample_rows
from agent_loop.servers.embedded.slots import PrefixInPrefill, Slot, SlotTable
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
    """Continuous batching over a fixed number of slots.

    A request keeps its slot to the end, and a slot holds the longest sequence there can be, so that nothing is ever
    set aside for lack of memory. Requests beyond the slots wait in line.
    """

    def __init__(self, runner: ModelRunner, *, config: EmbeddedConfig, server: str) -> None:
        self.weight_version = 0
        self.stats = EngineStats()
        self._runner = runner
        self._config = config
        self._server = server
        self._cache: KVCache | None = runner.allocate_cache()
        self._slots = SlotTable(num_slots=config.max_slots, max_model_len=config.max_model_len)
        self._random = Random(config.seed)
        self._waiting: deque[GenerationRequest] = deque()
        self._running: dict[int, GenerationRequest] = {}
        self._finished: list[tuple[GenerationRequest, Outcome]] = []
        self._sessions: set[str] = set()
        """Of all requests that wait or run."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_slots(self) -> int:
        return len(self._slots.slots)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def cache_bytes(self) -> int:
        """Memory of the KV cache; 0 while asleep."""
        return 0 if self._cache is None else self._cache.num_bytes

    def submit(self, request: GenerationRequest) -> None:
        """Puts a request in line.

        Raises:
            ServerError: The engine is asleep, or the session already has a request.
        """
        if self._cache is None:
            raise self._error("the server is asleep; call wake_up first", request)
        if request.request_id in self._sessions:
            raise self._error(
                "a completion of this session is still running; await or abort it first", request
            )
        self._sessions.add(request.request_id)
        self._waiting.append(request)

    def abort(self, request: GenerationRequest) -> None:
        """Ends a request with what it has; does nothing if it has ended already."""
        if request in self._waiting:
            self._waiting.remove(request)
            self._finish(request, "aborted")
        elif request.slot is not None and self._running.get(request.slot.index) is request:
            if request.slot.is_prefilling:
                # Nobody has seen its logits yet: were they NaN, the slot would be poisoned for the next request.
                self._wipe(request.slot)
            self._finish(request, "aborted")

    def abort_session(self, request_id: str) -> None:
        for request in self._requests():
            if request.request_id == request_id:
                self.abort(request)

    def end_session(self, request_id: str) -> None:
        self._slots.end_session(request_id)

    def step(self) -> None:
        """Runs one forward over everything that is ready for it."""
        self._admit()
        if not self._running or self._cache is None:
            return
        batch = pack_step(
            [request.slot for request in self._running.values() if request.slot is not None],
            cache=self._cache,
            chunk_tokens=self._config.prefill_chunk_tokens,
            images={i: request.images for i, request in self._running.items() if request.images is not None},
        )
        logits = self._runner.forward(batch)
        self._advance(batch)
        self._sample(batch, logits=logits)

    def take_finished(self) -> list[tuple[GenerationRequest, Outcome]]:
        """Hands over the requests that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def update_weights(self, weights: Mapping[str, Tensor], *, weight_version: int) -> None:
        """Raises: WeightsError: They do not fit; nothing was changed."""
        load_weights(self._runner.model, weights)
        self.weight_version = weight_version
        self._slots.forget_idle()
        for request in list(self._running.values()):
            if request.slot is None:
                continue
            if self._config.recompute_kv_on_update:
                request.slot.num_cached = 0
                request.num_preempted += 1
                self._read_images(request)
            else:
                request.slot.is_stale = True

    def sleep(self) -> None:
        """Raises: ServerError: Requests are still in the engine."""
        if self.has_work:
            raise ServerError(
                f"{self.num_running} requests run and {self.num_waiting} wait; await or abort them before sleep",
                server=self._server,
            )
        self._cache = None
        self._slots.forget_idle()
        self._runner.offload()

    def wake_up(self) -> None:
        if self._cache is None:
            self._runner.load()
            self._cache = self._runner.allocate_cache()

    def reset(self) -> None:
        """Forgets what idle slots hold, and counts from zero."""
        self._slots.forget_idle()
        self.stats = EngineStats()

    def release(self) -> None:
        """Frees the cache for good and hands the model back."""
        self._cache = None
        self._waiting.clear()
        self._running.clear()
        self._sessions.clear()
        self._runner.hand_back()

    def _requests(self) -> Iterable[GenerationRequest]:
        return (*self._running.values(), *self._waiting)

    def _admit(self) -> None:
        """Moves requests from the line to slots. One that can copy a prefix still being computed waits for that;
        the others pass it."""
        held: list[GenerationRequest] = []
        while self._waiting and self._slots.has_idle:
            request = self._waiting.popleft()
            if request.is_held or not self._place(request):
                held.append(request)
        self._waiting.extendleft(reversed(held))

    def _place(self, request: GenerationRequest) -> bool:
        placement = self._slots.place(request.prompt_ids, session=request.request_id)
        if isinstance(placement, PrefixInPrefill):
            request.waits_for = placement
            return False
        slot = self._slots.occupy(placement, prompt_ids=request.prompt_ids, session=request.request_id)
        if placement.copy_from is not None and self._cache is not None:
            self._cache.copy_prefix(
                source=placement.copy_from.index,
                target=slot.index,
                start=placement.copy_start,
                end=placement.num_reused,
            )
        self.stats.reused_tokens += placement.num_reused
        request.slot = slot
        request.num_cached_tokens = placement.num_reused
        self._running[slot.index] = request
        self._read_images(request)
        return True

    def _read_images(self, request: GenerationRequest) -> None:
        """Has the model look at the images that are still to compute; one that does not fit ends its request."""
        if request.images is None or request.slot is None:
            return
        try:
            self._runner.read_images(request.images, first_token=request.slot.num_cached)
        except FeaturesError as error:
            self._finish(request, self._error(str(error), request))

    def _advance(self, batch: StepBatch) -> None:
        self.stats.steps += 1
        for slot, count in batch.advances:
            num_prompt_left = len(self._running[slot.index].prompt_ids) - slot.num_cached
            self.stats.prefilled_tokens += max(0, min(count, num_prompt_left))
            slot.num_cached += count

    def _sample(self, batch: StepBatch, *, logits: Tensor) -> None:
        requests = [self._running[slot.index] for slot in batch.sampled_slots]
        if not requests:
            return
        rows = sample_rows(
            logits,
            params=[request.params for request in requests],
            uniforms=[
                (request.random or self._random).random() if request.params.temperature else 0.0
                for request in requests
            ],
        )
        for request, slot, row in zip(requests, batch.sampled_slots, rows, strict=True):
            self._accept(request, slot=slot, row=row)

    def _accept(self, request: GenerationRequest, *, slot: Slot, row: SampledRow) -> None:
        if not row.is_finite:
            self._wipe(slot)
            error = self._error(
                f"the model's logits are NaN or infinite after {slot.num_tokens} tokens; check the published weights "
                f"(version {self.weight_version}), or use float32 instead of a shorter type",
                request,
            )
            self._finish(request, error)
            return
        self.stats.decoded_tokens += 1
        slot.append(row.token_id)
        reason = request.append(row.token_id, row.log_prob, weight_version=self.weight_version)
        if reason is not None:
            self._finish(request, reason)

    def _finish(self, request: GenerationRequest, how: ServerStopReason | ServerError) -> None:
        if request.slot is not None:
            del self._running[request.slot.index]
            self._slots.release(request.slot)
        self._sessions.discard(request.request_id)
        outcome = (
            how if isinstance(how, ServerError) else request.output(how, weight_version=self.weight_version)
        )
        self._finished.append((request, outcome))

    def _wipe(self, slot: Slot) -> None:
        slot.is_stale = True
        if self._cache is not None:
            self._cache.zero(slot.index)

    def _error(self, message: str, request: GenerationRequest) -> ServerError:
        return ServerError(message, server=self._server, request_id=request.request_id)

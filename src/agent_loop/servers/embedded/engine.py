"""Scheduler of the embedded engine: admits requests, runs steps, and applies control calls between steps.

The engine consumes requests and produces outcomes, and never waits. It is not thread-safe: `EngineThread` owns it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from agent_loop.errors import ServerError
from agent_loop.seeds import derived_seed
from agent_loop.servers.embedded.config import EmbeddedConfig
from agent_loop.servers.embedded.grammar import without_forbidden
from agent_loop.servers.embedded.per_request_backend import PerRequestBackend
from agent_loop.servers.embedded.request import EngineRequest, ScoredRows, ScoreRequest
from agent_loop.servers.embedded.runner import ModelRunner
from agent_loop.servers.embedded.sampling import SampledRow, sample_rows, with_penalties
from agent_loop.servers.embedded.shared_cache_backend import SharedCacheBackend
from agent_loop.servers.embedded.vision import FeaturesError
from agent_loop.servers.embedded.weights import load_weights
from agent_loop.servers.scores import TokenScores
from agent_loop.types import IntArray, ServerStopReason, TokenChunk

ROWS_AT_ONCE = 64
"""Number of rows whose log-softmax is computed at once, which bounds the memory of float32 copies."""

AnyRequest: TypeAlias = EngineRequest | ScoreRequest
RequestOutcome: TypeAlias = list[TokenChunk] | TokenScores | ServerError
"""The last chunks of a completion, the scores of a text, or why the request failed."""


@dataclass(slots=True)
class EngineStats:
    """Counters since the start of an engine."""

    steps: int = 0
    """Number of forwards of the model."""
    prefilled_tokens: int = 0
    """Number of prompt tokens that were computed."""
    reused_tokens: int = 0
    """Number of prompt tokens that were found in the cache, including tokens copied from another slot."""
    decoded_tokens: int = 0
    """Number of sampled tokens."""
    scored_tokens: int = 0
    """Number of tokens of texts that were computed to score them. They are no prompt tokens."""


class EmbeddedEngine:
    """Continuous batching of requests on a backend. Requests are queued while the backend has no free slot."""

    def __init__(
        self,
        runner: ModelRunner,
        backend: SharedCacheBackend | PerRequestBackend,
        *,
        config: EmbeddedConfig,
        server: str,
    ) -> None:
        self.weight_version = 0
        self.stats = EngineStats()
        self.backend = backend
        self._runner = runner
        self._config = config
        self._server = server
        self._is_asleep = False
        self._num_unseeded = 0
        """Number of requests without a seed."""
        self._queued: deque[EngineRequest] = deque()
        self._running: dict[EngineRequest, None] = {}
        """Admitted requests, in the order of their admission."""
        self._finished: list[tuple[AnyRequest, RequestOutcome]] = []
        self._scores = ScoreQueue(backend, chunk_tokens=config.prefill_chunk_tokens)
        self._sessions: set[str] = set()
        """Sessions of all queued and running requests."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def kv_cache_share(self) -> float:
        """Share of the slots in use."""
        return len(self._running) / self._config.max_slots

    @property
    def num_waiting(self) -> int:
        return len(self._queued) + len(self._scores)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._queued or self._scores)

    def submit(self, request: EngineRequest) -> None:
        """Queue a request."""
        self._refuse_if_asleep(request)
        if request.request_id in self._sessions:
            raise self._error(
                "a completion of this session is still running; wait for it or abort it first", request
            )
        if request.seed is None:
            request.seed = derived_seed(self._config.seed, self._num_unseeded)
            self._num_unseeded += 1
        self._sessions.add(request.request_id)
        self._queued.append(request)

    def submit_score(self, request: ScoreRequest) -> None:
        """Queue a text to score."""
        self._refuse_if_asleep(request)
        self._scores.add(request)

    def cancel_score(self, request: ScoreRequest) -> None:
        """Cancel a text whose scores nobody waits for. Does nothing if it has ended."""
        if self._scores.remove(request):
            self._finished.append((request, self._error("the request was cancelled", request)))

    def abort(self, request: EngineRequest) -> None:
        """Abort a request, which returns its tokens so far. Does nothing if the request has ended."""
        if request in self._queued:
            self._queued.remove(request)
            self._finish(request, "aborted")
        elif request in self._running:
            self._finish(request, "aborted")

    def abort_session(self, request_id: str) -> None:
        for request in (*self._running, *self._queued):
            if request.request_id == request_id:
                self.abort(request)

    def end_session(self, request_id: str) -> None:
        self.backend.end_session(request_id)

    def step(self) -> None:
        """Admit queued requests, compute and sample the next tokens of the running requests, and compute a chunk of
        the texts to score."""
        # A request that can copy a prefix still in prefill waits for the prefix; later requests may start before it.
        postponed: list[EngineRequest] = []
        while self._queued and self.backend.has_room:
            request = self._queued.popleft()
            if not self._start(request):
                postponed.append(request)
        self._queued.extendleft(reversed(postponed))
        if self._running:
            output = self.backend.step()
            self.stats.steps += output.num_forwards
            self.stats.prefilled_tokens += output.num_prompt_tokens
            self._sample(output.requests, logits=output.logits)
        if self._scores:
            self._score()

    def take_finished(self) -> list[tuple[AnyRequest, RequestOutcome]]:
        """Return the requests that ended since the last call, with their outcomes."""
        finished, self._finished = self._finished, []
        return finished

    def update_weights(self, weights: Mapping[str, Tensor], *, weight_version: int) -> None:
        """Load new weights. In-flight requests continue with their cache."""
        load_weights(self._runner.model, weights)
        self.weight_version = weight_version
        self.backend.drop_idle()
        self._scores.restart()
        for request in self._running:
            self.backend.mark_stale(request)

    def sleep(self) -> None:
        """Free the caches and offload the weights."""
        if self.has_work:
            raise ServerError(
                f"{self.num_running} requests are running and {self.num_waiting} are queued; wait for them or abort "
                "them before sleep",
                server=self._server,
            )
        self._is_asleep = True
        self.backend.free()
        self._runner.offload()

    def wake_up(self) -> None:
        if self._is_asleep:
            self._runner.load()
            self.backend.allocate()
            self._is_asleep = False

    def release(self) -> None:
        """Drop all requests, free the cache, and give up the ownership of the model. The engine cannot be used
        again."""
        for request in self._running:
            self.backend.release(request, discard=True)
        self._queued.clear()
        self._scores.clear()
        self._running.clear()
        self.backend.free()
        self._sessions.clear()
        self._runner.restore_attention()

    def _start(self, request: EngineRequest) -> bool:
        try:
            if not self.backend.admit(request):
                return False
        except FeaturesError as error:
            self._finish(request, self._error(str(error), request))
            return True
        self.stats.reused_tokens += request.num_cached_tokens
        self._running[request] = None
        return True

    def _score(self) -> None:
        ended, num_tokens = self._scores.step()
        self.stats.steps += 1
        self.stats.scored_tokens += num_tokens
        for request in ended:
            if all(rows.is_finite for rows in request.rows):
                self._finished.append((request, request.scores()))
            else:
                self._finished.append((request, self._not_finite(len(request.token_ids), request)))

    def _sample(self, requests: Sequence[EngineRequest], *, logits: Tensor) -> None:
        if not requests:
            return
        params, uniforms = [r.params for r in requests], [r.draw() for r in requests]
        num_rows = 1 if self._config.deterministic else len(requests)
        rows: list[SampledRow] = []
        for start in range(0, len(requests), num_rows):
            part = slice(start, start + num_rows)
            constrained = without_forbidden(logits[part], [r.grammar for r in requests[part]])
            penalised = with_penalties(constrained, [r.penalties for r in requests[part]])
            rows += sample_rows(penalised, params=params[part], uniforms=uniforms[part])
        for request, row in zip(requests, rows, strict=True):
            self._accept(request, row=row)

    def _accept(self, request: EngineRequest, *, row: SampledRow) -> None:
        if request.grammar is not None and request.grammar.problem:
            problem = f"the grammar of json_schema failed ({request.grammar.problem}); give a simpler schema"
            self._finish(request, self._error(problem, request))
            return
        if not row.is_finite:
            num_tokens = len(request.prompt_ids) + request.num_sampled
            self._finish(request, self._not_finite(num_tokens, request))
            return
        self.stats.decoded_tokens += 1
        self.backend.append(request, row.token_id)
        reason = request.append(row, weight_version=self.weight_version)
        if reason is not None:
            self._finish(request, reason)

    def _finish(self, request: EngineRequest, how: ServerStopReason | ServerError) -> None:
        self._running.pop(request, None)
        self.backend.release(request, discard=isinstance(how, ServerError))
        self._sessions.discard(request.request_id)
        if isinstance(how, ServerError):
            self._finished.append((request, how))
        else:
            chunks = request.take_last_chunks(how, weight_version=self.weight_version)
            self._finished.append((request, chunks))

    def _refuse_if_asleep(self, request: AnyRequest) -> None:
        if self._is_asleep:
            raise self._error("the server is asleep; call wake_up first", request)

    def _not_finite(self, num_tokens: int, request: AnyRequest) -> ServerError:
        return self._error(
            f"the model's logits are NaN or infinite after {num_tokens} tokens; check the published weights "
            f"(version {self.weight_version}), or use float32 instead of a shorter type",
            request,
        )

    def _error(self, message: str, request: AnyRequest) -> ServerError:
        return ServerError(message, server=self._server, request_id=request.request_id)


class ScoreQueue:
    """Texts in the order of their requests. A step computes one chunk of a long text, or several short texts.

    A chunk has at most `chunk_tokens` tokens, so a step delays running completions as long as a chunk of a prompt does,
    and no tensor of [num_tokens, vocab] exists for a longer text.
    """

    def __init__(self, backend: SharedCacheBackend | PerRequestBackend, *, chunk_tokens: int) -> None:
        self._backend = backend
        self._chunk_tokens = chunk_tokens
        self._queued: deque[ScoreRequest] = deque()

    def __len__(self) -> int:
        return len(self._queued)

    def add(self, request: ScoreRequest) -> None:
        self._queued.append(request)

    def remove(self, request: ScoreRequest) -> bool:
        """Remove a request. Return whether it was queued."""
        if request not in self._queued:
            return False
        self._queued.remove(request)
        request.restart()
        return True

    def restart(self) -> None:
        """Drop the scores of texts that have begun, because the weights have changed."""
        for request in self._queued:
            request.restart()

    def clear(self) -> None:
        self._queued.clear()

    def step(self) -> tuple[list[ScoreRequest], int]:
        """Compute a chunk. Return the requests that have ended, and the number of computed tokens."""
        batch = self._next_batch()
        num_left = sum(request.num_left for request in batch)
        logits = self._backend.prefill(batch, chunk_tokens=self._chunk_tokens)
        for request, rows in zip(batch, logits, strict=True):
            end = request.num_computed + 1
            targets = request.token_ids[end - len(rows) : end]
            for first in range(0, len(rows), ROWS_AT_ONCE):
                part = slice(first, first + ROWS_AT_ONCE)
                request.rows.append(_score_rows(rows[part], targets=targets[part], num_top=request.num_top))
        ended = [request for request in batch if not request.num_left]
        for request in ended:
            self._queued.remove(request)
            request.cache = None
        return ended, num_left - sum(request.num_left for request in batch)

    def _next_batch(self) -> list[ScoreRequest]:
        """Return the first request, and the following ones as long as all fit into one chunk."""
        batch: list[ScoreRequest] = []
        room = self._chunk_tokens
        for request in self._queued:
            room -= request.num_left
            if batch and (room < 0 or request.num_computed):
                break
            batch.append(request)
            if request.num_computed:  # it has a cache of its own
                break
        return batch


@torch.inference_mode()
def _score_rows(logits: Tensor, *, targets: IntArray, num_top: int) -> ScoredRows:
    """Return the log-probs of the targets and of the likeliest tokens."""
    if logits.is_cuda and torch.are_deterministic_algorithms_enabled():
        logits = logits.cpu()  # sums along a row have no deterministic kernel on a GPU
    all_logprobs = logits.float().log_softmax(dim=-1)
    index = torch.as_tensor(targets, dtype=torch.long, device=logits.device).unsqueeze(1)
    top_logprobs, top_ids = all_logprobs.topk(num_top, dim=-1)
    is_finite = bool(all_logprobs.amax(dim=-1).isfinite().all())  # a NaN anywhere is the largest
    return ScoredRows(
        all_logprobs.gather(1, index)[:, 0].cpu(), top_ids.int().cpu(), top_logprobs.cpu(), is_finite
    )

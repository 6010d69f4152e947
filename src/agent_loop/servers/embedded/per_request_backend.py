"""Backend that computes one request per forward, with the model's own attention and cache. Its methods are those of
`SharedCacheBackend`.

This is the slower backend, for models that attention over slots does not support: recurrent layers, attention sinks,
soft caps, and attention in windows or chunks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from agent_loop.servers.embedded.config import EmbeddedConfig
from agent_loop.servers.embedded.request import EngineRequest, ScoreRequest
from agent_loop.servers.embedded.runner import ModelRunner
from agent_loop.servers.embedded.shared_cache_backend import CacheKind, StepOutput
from agent_loop.types import IntArray


@dataclass(slots=True, eq=False)
class _Sequence:
    """Tokens of one request, and the model's cache for them."""

    tokens: IntArray
    """Shape [max_model_len]; only the first `num_tokens` are used."""
    num_tokens: int
    num_at_once: int = 0
    """Number of leading tokens to compute in one forward. Each later token is computed in its own forward."""
    num_cached: int = 0
    cache: Any = None
    """Cache that the model's last forward returned; None before the first forward."""
    is_stale: bool = False
    """Whether older weights computed the cache."""

    def continues_with(self, prompt_ids: IntArray) -> bool:
        """Return whether the prompt starts with all cached tokens and has further tokens."""
        count = self.num_cached
        return count < len(prompt_ids) and np.array_equal(self.tokens[:count], prompt_ids[:count])


class PerRequestBackend:
    """Computes each request in separate forwards: first the whole prompt, then token by token.

    The logits of a request depend only on its own tokens and the weights, never on other requests. With
    `resumes_turns` they also depend on where the earlier turns of its session ended, because a turn resumes their
    cache.
    """

    def __init__(
        self, runner: ModelRunner, *, config: EmbeddedConfig, kind: CacheKind, resumes_turns: bool
    ) -> None:
        """Create a backend without requests."""
        self.kind: CacheKind = kind
        self.resumes_turns = resumes_turns
        self._runner = runner
        self._replays = config.deterministic
        """Whether the sampled tokens of a resumed completion are computed token by token, as in the original request.
        The other tokens are then equal to the last bit."""
        self._max_requests = config.max_slots
        self._max_model_len = config.max_model_len
        self._running: dict[EngineRequest, _Sequence] = {}
        self._idle: OrderedDict[str, _Sequence] = OrderedDict()
        """Sequences of released requests by session, least recently used first."""

    @property
    def num_bytes(self) -> int:
        sequences = (*self._running.values(), *self._idle.values())
        return sum(t.numel() * t.element_size() for s in sequences for t in _tensors_in(s.cache))

    @property
    def has_room(self) -> bool:
        return len(self._running) < self._max_requests

    def allocate(self) -> None:
        """Do nothing, because the cache of each request grows with its tokens."""

    def free(self) -> None:
        self.drop_idle()

    def admit(self, request: EngineRequest) -> bool:
        count = len(request.prompt_ids)
        sequence = self._idle.pop(request.request_id, None)
        if sequence is None or not sequence.continues_with(request.prompt_ids):
            sequence = _Sequence(np.zeros(self._max_model_len, dtype=np.int32), num_tokens=0)
        sequence.tokens[:count] = request.prompt_ids
        sequence.num_tokens = count
        sequence.num_at_once = count - request.params.num_sampled if self._replays else self._max_model_len
        request.num_cached_tokens = sequence.num_cached
        self._running[request] = sequence
        while self._idle and len(self._idle) + len(self._running) > self._max_requests:
            self._idle.popitem(last=False)
        return True

    def step(self) -> StepOutput:
        num_prompt_tokens = 0
        rows: list[Tensor] = []
        for request, sequence in self._running.items():
            num_prompt_tokens += max(0, len(request.prompt_ids) - sequence.num_cached)
            rows.append(self._next_logits(sequence))
        return StepOutput(
            requests=tuple(self._running),
            logits=torch.stack(rows),
            num_forwards=len(rows),
            num_prompt_tokens=num_prompt_tokens,
        )

    def prefill(self, texts: Sequence[ScoreRequest], *, chunk_tokens: int) -> list[Tensor]:
        logits: list[Tensor] = []
        for text in texts:
            start, end = text.num_computed, min(text.num_computed + chunk_tokens, len(text.tokens))
            first, text.num_computed = max(start, min(text.first, end - 1)), end
            if self.resumes_turns:
                rows, text.cache = self._runner.cached_logits(
                    text.tokens[start:end], cache=text.cache, num_logits=end - first
                )
            else:
                rows = self._runner.plain_logits(text.tokens[:end], first=first)
            logits.append(rows[max(text.first - first, 0) :])
        return logits

    def append(self, request: EngineRequest, token_id: int) -> None:
        sequence = self._running[request]
        sequence.tokens[sequence.num_tokens] = token_id
        sequence.num_tokens += 1

    def release(self, request: EngineRequest, *, discard: bool = False) -> None:
        sequence = self._running.pop(request, None)
        if sequence is None or discard or sequence.is_stale:
            return
        if self.resumes_turns and sequence.cache is not None:
            self._idle[request.request_id] = sequence

    def mark_stale(self, request: EngineRequest) -> None:
        self._running[request].is_stale = True

    def end_session(self, session: str) -> None:
        self._idle.pop(session, None)

    def drop_idle(self) -> None:
        self._idle.clear()

    def _next_logits(self, sequence: _Sequence) -> Tensor:
        """Compute the tokens that are not cached, and return the logits after the last token, [vocab]."""
        if self.kind == "none":
            tokens = sequence.tokens[: sequence.num_tokens]
            return self._runner.plain_logits(tokens, first=len(tokens) - 1)[0]
        for end in range(max(sequence.num_at_once, sequence.num_cached + 1), sequence.num_tokens):
            self._extend(sequence, end=end)
        return self._extend(sequence, end=sequence.num_tokens)

    def _extend(self, sequence: _Sequence, *, end: int) -> Tensor:
        logits, sequence.cache = self._runner.cached_logits(
            sequence.tokens[sequence.num_cached : end], cache=sequence.cache
        )
        sequence.num_cached = end
        return logits[0]


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors of a cache of any type."""
    parts: Iterable[Any] = ()
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        parts = cast(dict[Any, Any], value).values()
    elif isinstance(value, (list, tuple)):
        parts = cast(Iterable[Any], value)
    elif type(value).__module__.startswith("transformers."):
        parts = cast(dict[str, Any], vars(value)).values()
    for part in parts:
        yield from _tensors_in(part)

"""Queue of the texts that the embedded engine scores beside its completions."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from agent_loop.servers.embedded.per_request_backend import PerRequestBackend
from agent_loop.servers.embedded.request import ScoredRows, ScoreRequest
from agent_loop.servers.embedded.shared_cache_backend import SharedCacheBackend
from agent_loop.types import IntArray

ROWS_AT_ONCE = 64
"""Number of rows whose log-softmax is computed at once, which bounds the memory of float32 copies."""


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

"""Queue of the texts that the embedded engine scores beside its completions."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from agent_loop.servers.embedded.backend import ComputationBackend, TextPrefill
from agent_loop.servers.scores import TokenScores
from agent_loop.types import IntArray

ROWS_AT_ONCE = 64
"""Number of rows whose log-softmax is computed at once, which bounds the memory of float32 copies."""


class ScoredRows(NamedTuple):
    """Scores of consecutive tokens of a text, on the CPU."""

    logprobs: Tensor
    """Shape [rows]."""
    top_ids: Tensor
    """Shape [rows, K]."""
    top_logprobs: Tensor
    """Shape [rows, K]."""
    is_finite: bool
    """False if a row's logits contain NaN or positive infinity."""


@dataclass(slots=True, eq=False)
class ScoreRequest:
    """A text to score, and its scores so far. Only the engine's thread writes to it."""

    token_ids: IntArray
    """The whole text, shape [num_tokens], at least `start` + 1 tokens."""
    start: int
    num_top: int
    text: TextPrefill = field(init=False)
    rows: list[ScoredRows] = field(default_factory=list[ScoredRows])
    request_id: str = ""
    """Empty: a score has no session."""

    def __post_init__(self) -> None:
        self.token_ids = self.token_ids.copy()  # torch reads writable arrays only
        # The last token predicts nothing that is asked for.
        self.text = TextPrefill(self.token_ids[:-1], first=self.start - 1)

    def restart(self) -> None:
        """Drop the scores so far."""
        self.text.restart()
        self.rows.clear()

    def scores(self) -> TokenScores:
        """Return the scores of the whole text."""
        logprobs = torch.cat([rows.logprobs for rows in self.rows]).numpy()
        if not self.num_top:
            return TokenScores(logprobs)
        return TokenScores(
            logprobs,
            torch.cat([rows.top_ids for rows in self.rows]).numpy().astype(np.int32),
            torch.cat([rows.top_logprobs for rows in self.rows]).numpy(),
        )


class ScoreQueue:
    """Texts in the order of their requests. A step computes one chunk of a long text, or several short texts.

    A chunk has at most `chunk_tokens` tokens, so a step delays running completions as long as a chunk of a prompt does,
    and no tensor of [num_tokens, vocab] exists for a longer text.
    """

    def __init__(self, backend: ComputationBackend, *, chunk_tokens: int) -> None:
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
        num_left = sum(request.text.num_left for request in batch)
        logits = self._backend.prefill([request.text for request in batch], chunk_tokens=self._chunk_tokens)
        for request, rows in zip(batch, logits, strict=True):
            end = request.text.num_computed + 1
            targets = request.token_ids[end - len(rows) : end]
            for first in range(0, len(rows), ROWS_AT_ONCE):
                part = slice(first, first + ROWS_AT_ONCE)
                request.rows.append(_score_rows(rows[part], targets=targets[part], num_top=request.num_top))
        ended = [request for request in batch if not request.text.num_left]
        for request in ended:
            self._queued.remove(request)
            request.text.restart()
        return ended, num_left - sum(request.text.num_left for request in batch if request not in ended)

    def _next_batch(self) -> list[ScoreRequest]:
        """Return the first request, and the following ones as long as all fit into one chunk."""
        batch: list[ScoreRequest] = []
        room = self._chunk_tokens
        for request in self._queued:
            room -= request.text.num_left
            if batch and (room < 0 or request.text.num_computed):
                break
            batch.append(request)
            if request.text.num_computed:  # it has a cache of its own
                break
        return batch


@torch.inference_mode()
def _score_rows(logits: Tensor, *, targets: IntArray, num_top: int) -> ScoredRows:
    """Return the log-probs of the targets and of the likeliest tokens.

    Args:
        logits: Shape [rows, vocab].
        targets: Token of each row, shape [rows].
        num_top: Number of likeliest tokens.
    """
    if logits.is_cuda and torch.are_deterministic_algorithms_enabled():
        logits = logits.cpu()  # sums along a row have no deterministic kernel on a GPU
    all_logprobs = logits.float().log_softmax(dim=-1)
    index = torch.as_tensor(targets, dtype=torch.long, device=logits.device).unsqueeze(1)
    top_logprobs, top_ids = all_logprobs.topk(num_top, dim=-1)
    is_finite = bool(all_logprobs.amax(dim=-1).isfinite().all())  # a NaN anywhere is the largest
    return ScoredRows(
        all_logprobs.gather(1, index)[:, 0].cpu(), top_ids.int().cpu(), top_logprobs.cpu(), is_finite
    )

"""Penalties for tokens that a request already has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from agent_loop.types import IntArray, SamplingParams


class Penalties:
    """Penalties of one request, and the tokens that they count."""

    def __init__(self, params: SamplingParams, prompt_ids: IntArray) -> None:
        """Count the tokens so far. The last `params.num_sampled` tokens of the prompt belong to the completion."""
        self._params = params
        start = len(prompt_ids) - params.num_sampled
        sampled: list[int] = prompt_ids[start:].tolist()
        self._counts = Counter(sampled)
        has_repetition = params.repetition_penalty != 1.0
        # Placeholders of images have negative ids here.
        self._context = (
            {token for token in prompt_ids.tolist() if token >= 0} if has_repetition else set[int]()
        )

    @classmethod
    def of(cls, params: SamplingParams, prompt_ids: IntArray) -> Penalties | None:
        """Return the penalties of a request; None if it has none."""
        is_plain = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1, 0, 0)
        return None if is_plain else cls(params, prompt_ids)

    def accept(self, token_id: int) -> None:
        """Count a sampled token."""
        self._counts[token_id] += 1
        if self._params.repetition_penalty != 1.0:
            self._context.add(token_id)

    def subtract_from(self, logits: Tensor) -> None:
        """Change the logits of one row in place, shape [vocab]."""
        params = self._params
        if params.repetition_penalty != 1.0:
            seen = _index(self._context, like=logits)
            values, factor = logits[seen], params.repetition_penalty
            logits[seen] = torch.where(values > 0, values / factor, values * factor)
        if self._counts:
            counted = _index(self._counts, like=logits)
            counts = torch.tensor(list(self._counts.values()), device=logits.device, dtype=logits.dtype)
            logits[counted] -= params.frequency_penalty * counts + params.presence_penalty


def with_penalties(logits: Tensor, penalties: Sequence[Penalties | None]) -> Tensor:
    """Return logits, [rows, vocab], with the penalties of each row."""
    if not any(each is not None for each in penalties):
        return logits
    changed = logits.to(torch.float32, copy=True)
    for row, each in zip(changed, penalties, strict=True):
        if each is not None:
            each.subtract_from(row)
    return changed


def _index(token_ids: Iterable[int], *, like: Tensor) -> Tensor:
    return torch.tensor(list(token_ids), device=like.device, dtype=torch.int64)

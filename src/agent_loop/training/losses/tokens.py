"""What logits say of tokens. N places with logits, M tokens, V tokens of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(
    logits_NV: Tensor,
    *,
    token_ids_M: Tensor,
    place_M: Tensor,
    temperature: float,
    entropy_has_gradient: bool = True,
) -> tuple[Tensor, Tensor]:
    """`log_softmax(logits / temperature)` at the tokens, and the entropy of the same distributions.

    In float32, or in float64 where the logits are. Both of shape [M].

    Args:
        logits_NV: Of distributions over the vocabulary.
        token_ids_M: The tokens asked for.
        place_M: Which distribution each is drawn from.
        temperature: What logits are divided by.
        entropy_has_gradient: False computes it for the metrics alone.
    """
    precise_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    logprobs_NV = (precise_NV if temperature == 1 else precise_NV / temperature).log_softmax(dim=-1)
    entropy_N = entropy(logprobs_NV if entropy_has_gradient else logprobs_NV.detach())
    return logprobs_NV[place_M, token_ids_M], entropy_N[place_M]


def entropy(logprobs_NV: Tensor) -> Tensor:
    """In nats, of each distribution; shape [N]."""
    lowest = torch.finfo(logprobs_NV.dtype).min  # finite, so that a probability of 0 adds 0 and not NaN
    return -(logprobs_NV.exp() * logprobs_NV.clamp(min=lowest)).sum(dim=-1)

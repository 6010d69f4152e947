"""Log-probs and entropy from logits. N positions with logits, M tokens, V tokens of the vocabulary."""

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
    """Return `log_softmax(logits / temperature)` at the tokens, and the entropy of the distributions; [M] each.

    Both are float32, or float64 if the logits are float64.

    Args:
        logits_NV: Logits of distributions over the vocabulary.
        token_ids_M: Token ids.
        place_M: Index of each token's distribution, among the N.
        temperature: Divisor of the logits.
        entropy_has_gradient: False computes the entropy for metrics only.
    """
    precise_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    logprobs_NV = (precise_NV if temperature == 1 else precise_NV / temperature).log_softmax(dim=-1)
    entropy_N = entropy(logprobs_NV if entropy_has_gradient else logprobs_NV.detach())
    return logprobs_NV[place_M, token_ids_M], entropy_N[place_M]


def entropy(logprobs_NV: Tensor) -> Tensor:
    """Return the entropy of each distribution in nats; [N]."""
    lowest = torch.finfo(logprobs_NV.dtype).min  # finite, so that a probability of 0 adds 0 and not NaN
    return -(logprobs_NV.exp() * logprobs_NV.clamp(min=lowest)).sum(dim=-1)

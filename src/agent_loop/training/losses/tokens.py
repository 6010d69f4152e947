"""What logits say of tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def token_log_probs(logits_BTV: Tensor, *, token_ids_BT: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """`log_softmax(logits / temperature)` at the tokens, and the entropy of the same distribution.

    In float32, or in float64 where the logits are. Both of shape [B, T].
    """
    precise_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32)) / temperature
    log_probs_BTV = precise_BTV.log_softmax(dim=-1)
    chosen_BT = log_probs_BTV.gather(-1, token_ids_BT.unsqueeze(-1)).squeeze(-1)
    return chosen_BT, entropy(log_probs_BTV)


def entropy(log_probs_BTV: Tensor) -> Tensor:
    """In nats, of each token's distribution; shape [B, T]."""
    lowest = torch.finfo(log_probs_BTV.dtype).min  # finite, so that a probability of 0 adds 0 and not NaN
    return -(log_probs_BTV.exp() * log_probs_BTV.clamp(min=lowest)).sum(dim=-1)

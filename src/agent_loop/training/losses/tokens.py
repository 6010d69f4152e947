"""Log-probs and entropy from logits. N positions with logits, M tokens, K candidates, V tokens of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """Log-probs of tokens, and entropies in nats. All are float32, or float64 if the logits are float64."""

    sampled_M: Tensor
    entropy_M: Tensor
    """Entropy of the distribution of each token."""
    candidates_MK: Tensor | None = None
    """Log-probs of the candidates in place of each token; None if there were no candidates."""


def token_logprobs(
    logits_NV: Tensor,
    *,
    token_ids_M: Tensor,
    place_M: Tensor,
    temperature: float,
    entropy_has_gradient: bool = True,
    candidate_ids_MK: Tensor | None = None,
) -> TokenLogProbs:
    """Return `log_softmax(logits / temperature)` at the tokens, and the entropy of the distributions.

    Args:
        logits_NV: Logits of distributions over the vocabulary.
        token_ids_M: Token ids.
        place_M: Index of each token's distribution, among the N.
        temperature: Divisor of the logits.
        entropy_has_gradient: False computes the entropy for metrics only.
        candidate_ids_MK: Token ids whose log-probs are returned too, in place of each token.
    """
    precise_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    logprobs_NV = (precise_NV if temperature == 1 else precise_NV / temperature).log_softmax(dim=-1)
    entropy_N = entropy(logprobs_NV if entropy_has_gradient else logprobs_NV.detach())
    return TokenLogProbs(
        logprobs_NV[place_M, token_ids_M],
        entropy_N[place_M],
        None if candidate_ids_MK is None else logprobs_NV[place_M.unsqueeze(-1), candidate_ids_MK],
    )


def entropy(logprobs_NV: Tensor) -> Tensor:
    """Return the entropy of each distribution in nats; [N]."""
    lowest = torch.finfo(logprobs_NV.dtype).min  # finite, so that a probability of 0 adds 0 and not NaN
    return -(logprobs_NV.exp() * logprobs_NV.clamp(min=lowest)).sum(dim=-1)

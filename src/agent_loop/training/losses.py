"""The losses of PPO and their parts. Pure functions of tensors; B rows, T response tokens, V tokens known.

A value at a masked token changes no result and gets a gradient of exactly 0, be it infinite or NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

AggregationMode: TypeAlias = Literal["token-mean", "seq-mean-token-mean"]
"""`token-mean`: every token counts the same. `seq-mean-token-mean`: every row does."""

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut to this size, so that one absurd token cannot make the loss infinite."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss and what it was made of; all scalars."""

    loss: Tensor
    """With gradient."""
    ppo_kl: Tensor
    """Estimate of the KL divergence from the old policy: the mean of old minus new log-prob."""
    clip_fraction: Tensor
    """Share of tokens whose gradient the clip took away."""


def policy_loss(
    log_probs_BT: Tensor,
    *,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    agg_mode: AggregationMode = "token-mean",
    denominator: float | None = None,
) -> PolicyLoss:
    """The clipped surrogate of PPO (arXiv 1707.06347, equation 7), with separate bounds (arXiv 2503.14476).

    `-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)`, where `ratio = exp(log_probs - old_log_probs)`.

    Args:
        log_probs_BT: Of the policy that is trained, with gradient.
        old_log_probs_BT: Of the policy that sampled.
        advantages_BT: Or anything that broadcasts to it.
        mask_BT: 1 for tokens to train on.
        clip_ratio_low: How far the ratio may fall below 1.
        clip_ratio_high: How far it may rise above 1.
        agg_mode: How tokens are weighed against each other.
        denominator: See `aggregate`.
    """
    log_ratio_BT = masked_difference(log_probs_BT, old_log_probs_BT, mask_BT=mask_BT)
    ratio_BT = log_ratio_BT.exp()
    clipped_BT = ratio_BT.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    plain_loss_BT, clipped_loss_BT = -advantages_BT * ratio_BT, -advantages_BT * clipped_BT
    worse_BT = torch.maximum(plain_loss_BT, clipped_loss_BT)

    def reduce(values_BT: Tensor) -> Tensor:
        return aggregate(values_BT, mask_BT=mask_BT, mode=agg_mode, denominator=denominator)

    return PolicyLoss(
        loss=reduce(worse_BT),
        ppo_kl=reduce(-log_ratio_BT.detach()),
        clip_fraction=reduce((clipped_loss_BT > plain_loss_BT).to(ratio_BT.dtype)),
    )


def kl_penalty(log_probs_BT: Tensor, *, reference_log_probs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Per token, the estimator `k3 = r - 1 - log r` with `r = reference / policy` of the KL divergence from the
    reference: never negative, unbiased (J. Schulman, "Approximating KL divergence", 2020). Shape [B, T]."""
    log_ratio_BT = masked_difference(reference_log_probs_BT, log_probs_BT, mask_BT=mask_BT)
    return log_ratio_BT.exp() - 1 - log_ratio_BT


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


def aggregate(
    values_BT: Tensor, *, mask_BT: Tensor, mode: AggregationMode, denominator: float | None = None
) -> Tensor:
    """Weighs tokens into one number.

    Args:
        values_BT: Any values; those at masked tokens do not count.
        mask_BT: 1 for tokens that count.
        mode: How tokens are weighed.
        denominator: What the sum is divided by. Give `loss_denominator` of the whole mini-batch when these rows
            are only a part of it: then the parts' results add up to the whole's. None is that of these rows.
    """
    values_BT = torch.where(mask_BT.bool(), values_BT, 0.0)
    if denominator is None:
        denominator = loss_denominator(mask_BT, mode=mode)
    if mode == "token-mean":
        return values_BT.sum() / denominator
    return (values_BT.sum(dim=-1) / mask_BT.sum(dim=-1).clamp(min=1)).sum() / denominator


def loss_denominator(mask_BT: Tensor, *, mode: AggregationMode) -> float:
    """The number of tokens, or of rows, that a mean is taken over; at least 1."""
    counted = mask_BT.sum() if mode == "token-mean" else mask_BT.any(dim=-1).sum()
    return max(1.0, float(counted))


def masked_mean(values_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
    """The mean over all unmasked tokens; 0 if there are none."""
    return aggregate(values_BT, mask_BT=mask_BT, mode="token-mean")


def masked_difference(left_BT: Tensor, right_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
    """Left minus right, cut to `MAX_LOG_RATIO`, and 0 at masked tokens."""
    difference_BT = torch.where(mask_BT.bool(), left_BT - right_BT, 0.0)
    return difference_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

"""The losses of the policy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agent_loop.config import AggregationMode, Level
from agent_loop.training.losses.aggregation import Aggregation, loss_denominator, masked_difference


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss and what it was made of; all scalars."""

    loss: Tensor
    """With gradient."""
    ppo_kl: Tensor
    """Estimate of the KL divergence from the old policy: the mean of old minus new log-prob."""
    clip_fraction: Tensor
    """Share of tokens whose gradient the clip took away."""
    dual_clip_fraction: Tensor
    """Share of tokens whose gradient the dual clip took away."""


def policy_loss(
    logprobs_BT: Tensor,
    *,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None = None,
    level: Level = "token",
    weights_BT: Tensor | None = None,
    agg_mode: AggregationMode = "token-mean",
    denominator: float | None = None,
    lengths_B: Tensor | None = None,
) -> PolicyLoss:
    """The clipped surrogate of PPO (arXiv 1707.06347, equation 7), with separate bounds (arXiv 2503.14476).

    `-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)`, where `ratio = exp(logprobs - old_log_probs)`; where the
    advantage is negative, at most `-c * A` (arXiv 1912.09729).

    Args:
        logprobs_BT: Of the policy that is trained, with gradient.
        old_logprobs_BT: Of the policy that sampled.
        advantages_BT: Or anything that broadcasts to it.
        mask_BT: 1 for tokens to train on.
        clip_ratio_low: How far the ratio may fall below 1.
        clip_ratio_high: How far it may rise above 1.
        clip_ratio_c: The dual clip; None is none.
        level: Whose ratio: each token's, or its row's as `sequence_log_ratio` has it.
        weights_BT: Tokens' losses are multiplied by these; None is 1.
        agg_mode: How tokens are weighed against each other.
        denominator: See `aggregate`.
        lengths_B: See `aggregate`.
    """
    log_ratio_BT = masked_difference(logprobs_BT, old_logprobs_BT, mask_BT=mask_BT)
    used_BT = log_ratio_BT if level == "token" else sequence_log_ratio(log_ratio_BT, mask_BT=mask_BT)
    ratio_BT = used_BT.exp()
    clipped_BT = ratio_BT.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    plain_loss_BT, clipped_loss_BT = -advantages_BT * ratio_BT, -advantages_BT * clipped_BT
    loss_BT = torch.maximum(plain_loss_BT, clipped_loss_BT)
    is_bounded_BT = torch.zeros_like(loss_BT, dtype=torch.bool)
    if clip_ratio_c is not None:
        bound_BT = -advantages_BT * clip_ratio_c
        is_bounded_BT = (advantages_BT < 0) & (loss_BT > bound_BT)
        loss_BT = torch.where(is_bounded_BT, bound_BT, loss_BT)
    if weights_BT is not None:
        loss_BT = loss_BT * weights_BT
    if denominator is None:
        denominator = loss_denominator(mask_BT, mode=agg_mode)
    reduce = Aggregation(mode=agg_mode, denominator=denominator, lengths_B=lengths_B)
    return PolicyLoss(
        loss=reduce(loss_BT, mask_BT=mask_BT),
        ppo_kl=reduce(-log_ratio_BT.detach(), mask_BT=mask_BT),
        clip_fraction=reduce((clipped_loss_BT > plain_loss_BT).to(ratio_BT.dtype), mask_BT=mask_BT),
        dual_clip_fraction=reduce(is_bounded_BT.to(ratio_BT.dtype), mask_BT=mask_BT),
    )


def sequence_log_ratio(log_ratio_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
    """The mean log-ratio of each row at each of its tokens, [B, T]: the ratio of GSPO (arXiv 2507.18071).

    Each token has the gradient of its own log-prob only (GSPO-token), which adds up to the same where the
    advantages of a row are equal, and lets them differ.
    """
    lengths_B1 = mask_BT.sum(dim=-1, keepdim=True).clamp(min=1)
    mean_B1 = (log_ratio_BT.sum(dim=-1, keepdim=True) / lengths_B1).detach()
    return mean_B1 + log_ratio_BT - log_ratio_BT.detach()

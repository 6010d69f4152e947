"""DPPO: the policy gradient inside a trust region of the divergence."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from agent_loop.config import ActorConfig, Divergence
from agent_loop.training.losses.aggregation import masked_difference
from agent_loop.training.losses.policy import TokenLoss
from agent_loop.training.registry import policy_loss

THRESHOLDS: dict[Divergence, float] = {"tv": 0.15, "kl": 0.05}
"""Thresholds of the paper."""


@policy_loss("dppo")
def dppo(
    logprobs_BT: Tensor,
    *,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    config: ActorConfig,
) -> TokenLoss:
    """Return DPPO's loss `-keep * ratio * A` with a binary divergence (Qi et al., arXiv 2602.04879).

    `keep` is 0 for tokens whose divergence exceeds `dppo_threshold`, if the update would raise the divergence: if the
    advantage is positive and the ratio above 1, or the advantage negative and the ratio below 1. With `clip_ratio_c`
    the ratio is at most `c`. Such a token keeps its gradient, with weight `c`.

    Returns:
        The loss with the metric `clip_fraction`: 1 for tokens that are not kept.
    """
    log_ratio_BT = masked_difference(logprobs_BT, old_logprobs_BT, mask_BT=mask_BT)
    divergence_BT = binary_divergence(
        logprobs_BT.detach(), old_logprobs_BT=old_logprobs_BT, mask_BT=mask_BT, kind=config.dppo_divergence
    )
    threshold = config.dppo_threshold or THRESHOLDS[config.dppo_divergence]
    moves_away_BT = advantages_BT * log_ratio_BT.detach() > 0
    is_dropped_BT = moves_away_BT & (divergence_BT > threshold)
    weights_BT = log_ratio_BT.detach().exp().clamp(max=config.clip_ratio_c or math.inf)
    surrogate_BT = weights_BT * (1 + log_ratio_BT - log_ratio_BT.detach())
    return TokenLoss(
        torch.where(is_dropped_BT, 0.0, -advantages_BT * surrogate_BT),
        {"clip_fraction": is_dropped_BT.to(log_ratio_BT.dtype)},
    )


def binary_divergence(
    logprobs_BT: Tensor, *, old_logprobs_BT: Tensor, mask_BT: Tensor, kind: Divergence
) -> Tensor:
    """Return the divergence of two distributions over two outcomes: the sampled token and any other token; [B, T].

    `tv` is the total variation `|p - p_old|`. `kl` is the KL divergence of the new distribution from the old one,
    `p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))`. Both are lower bounds of the divergence over the
    vocabulary.
    """
    old_BT = old_logprobs_BT.exp()
    if kind == "tv":
        return (logprobs_BT.exp() - old_BT).abs()
    log_ratio_BT = masked_difference(old_logprobs_BT, logprobs_BT, mask_BT=mask_BT)
    other_log_ratio_BT = masked_difference(
        _log_complement(old_logprobs_BT), _log_complement(logprobs_BT), mask_BT=mask_BT
    )
    return old_BT * log_ratio_BT + (1 - old_BT) * other_log_ratio_BT


def _log_complement(logprobs_BT: Tensor) -> Tensor:
    """Return `log(1 - p)`, which is also exact where p is near 0 or 1."""
    return (-torch.expm1(logprobs_BT)).log()

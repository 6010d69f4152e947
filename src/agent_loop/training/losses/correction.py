"""Importance sampling between rollout and trainer, whose log-probs of a token may differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agent_loop.config import CorrectionConfig
from agent_loop.training.branches import per_rollout
from agent_loop.training.losses.aggregation import MAX_LOG_RATIO, masked_difference, rollout_lengths


@dataclass(frozen=True, slots=True)
class Correction:
    """Importance weights of tokens, and the shares of tokens that they change."""

    weights_BT: Tensor
    """Weights, 0 at masked tokens; without gradient."""
    truncated_share: float
    """Share of tokens whose weight was cut."""
    masked_share: float
    """Share of tokens that are dropped."""


def correct(
    logprobs_BT: Tensor,
    *,
    rollout_logprobs_BT: Tensor,
    mask_BT: Tensor,
    config: CorrectionConfig,
    rollouts_B: Tensor | None = None,
) -> Correction:
    """Return bounded importance weights `exp(logprobs - rollout_logprobs)`, for `kind` `truncate` or `mask`.

    Truncated: `min(ratio, max_ratio)` (Yao et al., "Your efficient RL framework secretly brings you off-policy RL
    training", 2025). Masked: the ratio where it is between `min_ratio` and `max_ratio`, else 0 (Liu et al., "When speed
    kills stability", 2025). At level `sequence` the ratio is the product over the tokens of the rollout, in all its
    rows. At level `geometric` it is their geometric mean, as in GSPO (arXiv 2507.18071).

    Args:
        logprobs_BT: Log-probs of the trainer, under the weights that sampled.
        rollout_logprobs_BT: Log-probs of the servers.
        mask_BT: 1 for tokens to train on.
        config: Kind, level and bounds.
        rollouts_B: Number of the rollout of each row; None: each row is a rollout.
    """
    log_ratio_BT = masked_difference(logprobs_BT.detach(), rollout_logprobs_BT, mask_BT=mask_BT)
    if config.level != "token":
        rollouts_B = torch.arange(len(mask_BT), device=mask_BT.device) if rollouts_B is None else rollouts_B
        rollout_B = per_rollout(log_ratio_BT.sum(dim=-1), rollouts_B=rollouts_B)
        if config.level == "geometric":
            rollout_B = rollout_B / rollout_lengths(mask_BT, rollouts_B=rollouts_B).clamp(min=1)
        rollout_B = rollout_B.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        log_ratio_BT = rollout_B[:, None].expand_as(log_ratio_BT)
    ratio_BT, is_counted_BT = log_ratio_BT.exp(), mask_BT.bool()
    is_above_BT, is_below_BT = ratio_BT > config.max_ratio, ratio_BT < config.min_ratio
    nothing_BT = torch.zeros_like(is_counted_BT)
    is_masked_BT = is_above_BT | is_below_BT if config.kind == "mask" else nothing_BT
    is_cut_BT = is_above_BT if config.kind == "truncate" else nothing_BT
    weights_BT = torch.where(is_counted_BT & ~is_masked_BT, ratio_BT.clamp(max=config.max_ratio), 0.0)
    num_counted = max(1, int(is_counted_BT.sum()))
    return Correction(
        weights_BT=weights_BT,
        truncated_share=int((is_cut_BT & is_counted_BT).sum()) / num_counted,
        masked_share=int((is_masked_BT & is_counted_BT).sum()) / num_counted,
    )

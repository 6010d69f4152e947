"""CISPO: the policy gradient with clipped importance weights."""

from __future__ import annotations

import torch
from torch import Tensor

from agent_loop.config import ActorConfig
from agent_loop.training.losses.aggregation import masked_difference
from agent_loop.training.losses.policy import TokenLoss
from agent_loop.training.registry import policy_loss


@policy_loss("cispo")
def cispo(
    logprobs_BT: Tensor,
    *,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    config: ActorConfig,
) -> TokenLoss:
    """Return CISPO's loss `-min(ratio, 1 + high) * A * logprobs` (MiniMax-M1, arXiv 2506.13585).

    The weight `min(ratio, 1 + high)` has no gradient, so every token has one. There is no lower bound, as in the runs
    of the paper.

    Returns:
        The loss with the metric `clip_fraction`: 1 for tokens whose weight was clipped.
    """
    log_ratio_BT = masked_difference(logprobs_BT, old_logprobs_BT, mask_BT=mask_BT)
    ratio_BT = log_ratio_BT.detach().exp()
    weights_BT = ratio_BT.clamp(max=1 + config.clip_ratio_high)
    # The value is that of the log-prob; the gradient is that of the log-ratio, which has none where it is cut.
    value_BT = torch.where(logprobs_BT.isneginf(), 0.0, logprobs_BT).detach()
    own_logprobs_BT = value_BT + log_ratio_BT - log_ratio_BT.detach()
    return TokenLoss(
        -weights_BT * advantages_BT * own_logprobs_BT,
        {"clip_fraction": (ratio_BT > weights_BT).to(ratio_BT.dtype)},
    )

"""SAPO: a smooth gate in place of PPO's clip."""

from __future__ import annotations

import torch
from torch import Tensor

from agent_loop.config import ActorConfig
from agent_loop.training.losses.aggregation import masked_difference
from agent_loop.training.losses.policy import TokenLoss
from agent_loop.training.registry import policy_loss


@policy_loss("sapo")
def sapo(
    logprobs_BT: Tensor,
    *,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    config: ActorConfig,
) -> TokenLoss:
    """Return SAPO's loss `-4 / tau * sigmoid(tau * (ratio - 1)) * A` (Gao et al., arXiv 2511.20347).

    `tau` is `tau_pos` if the advantage is positive, else `tau_neg`. At a ratio of 1 the gradient is that of the ratio.
    It decreases smoothly on both sides, faster for a larger `tau`.
    """
    ratio_BT = masked_difference(logprobs_BT, old_logprobs_BT, mask_BT=mask_BT).exp()
    tau_BT = torch.full_like(ratio_BT, config.tau_neg).masked_fill(advantages_BT > 0, config.tau_pos)
    return TokenLoss(-4 / tau_BT * torch.sigmoid(tau_BT * (ratio_BT - 1)) * advantages_BT)

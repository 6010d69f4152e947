"""Estimates of the KL divergence between two policies from the tokens that one of them sampled."""

from __future__ import annotations

from torch import Tensor

from agent_loop.config import KLEstimator
from agent_loop.training.losses.aggregation import masked_difference


def kl_penalty(
    logprobs_BT: Tensor, *, reference_logprobs_BT: Tensor, mask_BT: Tensor, estimator: KLEstimator = "k3"
) -> Tensor:
    """Return an estimate of the KL divergence of the policy from the reference per token; [B, T], 0 at masked tokens.

    With `r = reference / policy` (J. Schulman, "Approximating KL divergence", 2020): `k1 = -log r` is unbiased, and may
    be negative. `k2 = (log r)^2 / 2` is never negative and a little biased; its gradient is that of the divergence.
    `k3 = r - 1 - log r` is never negative and unbiased.
    """
    log_ratio_BT = masked_difference(reference_logprobs_BT, logprobs_BT, mask_BT=mask_BT)
    match estimator:
        case "k1":
            return -log_ratio_BT
        case "k2":
            return log_ratio_BT.square() / 2
        case "k3":
            return log_ratio_BT.exp() - 1 - log_ratio_BT

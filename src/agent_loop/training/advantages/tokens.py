"""Returns and advantages of tokens. B rows, R response tokens.

Only sampled tokens are steps. Tokens between two turns of the model are skipped, and do not end the sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor


def discounted_returns(rewards_BR: Tensor, *, mask_BR: Tensor, gamma: float) -> Tensor:
    """Return discounted returns `G_t = r_t + gamma * G_next`, [B, R] float64; 0 at masked tokens.

    `next` is the next sampled token, after those of tools and users (REINFORCE++, arXiv 2501.03262, with observations
    skipped).

    Args:
        rewards_BR: Reward of each token; rewards at masked tokens do not count.
        mask_BR: 1 for sampled tokens.
        gamma: Discount per sampled token.
    """
    nothing_BR = torch.zeros_like(rewards_BR)  # with values of 0, the advantage is the return
    return gae(rewards_BR, values_BR=nothing_BR, mask_BR=mask_BR, gamma=gamma, lam=1.0)


def gae(rewards_BR: Tensor, *, values_BR: Tensor, mask_BR: Tensor, gamma: float, lam: float) -> Tensor:
    """Return generalised advantage estimates (arXiv 1506.02438, equation 16), [B, R] float64; 0 at masked tokens.

    `A_t = d_t + gamma * lam * A_next` with `d_t = r_t + gamma * V_next - V_t`. `next` is the next sampled token, after
    those of tools and users. After the last sampled token, both are 0.

    Args:
        rewards_BR: Reward of each token; rewards at masked tokens do not count.
        values_BR: Values that the critic predicts before each token.
        mask_BR: 1 for sampled tokens.
        gamma: Discount per sampled token.
        lam: Weight of later rewards against the critic's next value.
    """
    is_model_BR = mask_BR.bool()
    rewards_BR, values_BR = rewards_BR.double(), values_BR.double()
    advantages_BR = torch.zeros_like(rewards_BR)
    next_value_B = next_advantage_B = rewards_BR.new_zeros(len(rewards_BR))
    for place in reversed(range(rewards_BR.shape[1])):
        is_model_B, value_B = is_model_BR[:, place], values_BR[:, place]
        delta_B = rewards_BR[:, place] + gamma * next_value_B - value_B
        advantage_B = delta_B + gamma * lam * next_advantage_B
        next_value_B = torch.where(is_model_B, value_B, next_value_B)
        next_advantage_B = torch.where(is_model_B, advantage_B, next_advantage_B)
        advantages_BR[:, place] = torch.where(is_model_B, advantage_B, 0.0)
    return advantages_BR


def whiten(
    values_BR: Tensor, *, mask_BR: Tensor, weights_B: Tensor | None = None, eps: float = 1e-8
) -> Tensor:
    """Return `(x - mean) / sqrt(variance + eps)` over all unmasked tokens, [B, R]; 0 at masked tokens.

    The variance is the sample's (divided by n - 1). Equal values give exactly 0.

    Args:
        values_BR: Values to whiten.
        mask_BR: 1 for tokens that count.
        weights_B: Weight of the tokens of each row in mean and variance; None is 1.
        eps: Keeps the division finite.
    """
    is_counted_BR = mask_BR.bool()
    counted_N = values_BR[is_counted_BR]
    if not len(counted_N) or counted_N.min() == counted_N.max():
        return torch.zeros_like(values_BR)
    weights_BR = torch.ones_like(values_BR) if weights_B is None else weights_B[:, None].expand_as(values_BR)
    weights_N = weights_BR[is_counted_BR].to(values_BR.dtype)
    count = weights_N.sum()
    centred_BR = torch.where(is_counted_BR, values_BR - (counted_N * weights_N).sum() / count, 0.0)
    variance = (weights_BR * centred_BR.square()).sum() / (count - 1).clamp(min=1)
    return centred_BR / (variance + eps).sqrt()

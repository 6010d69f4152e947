"""Trajectories against the others of their group. B trajectories, R response tokens."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


def grpo_advantages(
    rewards_B: Tensor, *, groups_B: Tensor, norm_by_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """How much better a trajectory is than its group: `(r - mean(group)) / (std(group) + eps)`, float32.

    The formula is that of DeepSeekMath (arXiv 2402.03300, section 4.1.2); without the division it is that of
    Dr. GRPO (arXiv 2503.20783). The standard deviation is the sample's (divided by n - 1).

    Args:
        rewards_B: NaN for a trajectory that nothing scored: it counts in no statistic and gets 0.
        groups_B: The number of the group that each trajectory belongs to.
        norm_by_std: Divide by the standard deviation.
        eps: Keeps the division finite.

    A group without two different rewards gets exactly 0.
    """
    group = _Groups(rewards_B, groups_B)
    centred_B = torch.where(group.is_scored_B, group.rewards_B - group.mean_B(), 0.0)
    if norm_by_std:
        variance_B = group.sum_B(centred_B**2) / (group.count_B() - 1).clamp(min=1)
        centred_B = centred_B / (variance_B.sqrt() + eps)
    return torch.where(has_signal(rewards_B, groups_B=groups_B), centred_B, 0.0).float()


def rloo_advantages(rewards_B: Tensor, *, groups_B: Tensor) -> Tensor:
    """How much better a trajectory is than the mean of the others of its group, float32.

    The formula is that of REINFORCE leave-one-out (arXiv 2402.14740): `(r - mean(group)) * n / (n - 1)`.

    Args:
        rewards_B: NaN for a trajectory that nothing scored: it counts in no mean and gets 0.
        groups_B: The number of the group that each trajectory belongs to.

    A group without two different rewards gets exactly 0.
    """
    group = _Groups(rewards_B, groups_B)
    count_B = group.count_B()
    advantages_B = (group.rewards_B - group.mean_B()) * count_B / (count_B - 1).clamp(min=1)
    return torch.where(has_signal(rewards_B, groups_B=groups_B), advantages_B, 0.0).float()


def turn_advantages(
    turn_rewards_BR: Tensor,
    *,
    is_rewarded_BR: Tensor,
    groups_B: Tensor,
    norm_by_std: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """What each token's turn and the turns after it were worth against those of the group; [B, R] float32.

    The formula is that of DeepSeekMath for process supervision (arXiv 2402.03300, section 4.1.3): each reward is
    centred and divided by the standard deviation of all rewards of turns in its group, and a token gets the sum of
    those that come at it or after it.

    Args:
        turn_rewards_BR: Each at the last token of its turn.
        is_rewarded_BR: Where there is a reward that counts, be it 0.
        groups_B: The number of the group that each trajectory belongs to.
        norm_by_std: Divide by the standard deviation.
        eps: Keeps the division finite.

    A group without two different rewards gets exactly 0.
    """
    rows_N, places_N = is_rewarded_BR.nonzero(as_tuple=True)
    scores_N = grpo_advantages(
        turn_rewards_BR[rows_N, places_N], groups_B=groups_B[rows_N], norm_by_std=norm_by_std, eps=eps
    )
    scores_BR = torch.zeros(turn_rewards_BR.shape, dtype=torch.float32)
    scores_BR[rows_N, places_N] = scores_N
    return scores_BR.flip(1).cumsum(1).flip(1)


def has_signal(rewards_B: Tensor, *, groups_B: Tensor) -> Tensor:
    """Bool [B]: the trajectory is scored, and not all of its group's rewards are equal."""
    group = _Groups(rewards_B, groups_B)
    highest_B = group.reduce_B(group.rewards_B, "amax", fill=-torch.inf)
    lowest_B = group.reduce_B(group.rewards_B, "amin", fill=torch.inf)
    return group.is_scored_B & (highest_B > lowest_B)


class _Groups:
    """Statistics of the scored trajectories of each one's group, in float64: equal rewards must stay equal."""

    def __init__(self, rewards_B: Tensor, groups_B: Tensor) -> None:
        self.rewards_B = rewards_B.double()
        self.is_scored_B = ~self.rewards_B.isnan()
        self._index_B: Tensor = cast(Any, torch).unique(groups_B, return_inverse=True)[1]

    def reduce_B(self, values_B: Tensor, operation: str, *, fill: float) -> Tensor:
        values_B = torch.where(self.is_scored_B, values_B, fill)
        per_group = torch.full((len(values_B),), fill, dtype=values_B.dtype, device=values_B.device)
        return per_group.scatter_reduce(0, self._index_B, values_B, operation)[self._index_B]

    def sum_B(self, values_B: Tensor) -> Tensor:
        return self.reduce_B(values_B, "sum", fill=0.0)

    def count_B(self) -> Tensor:
        return self.sum_B(torch.ones_like(self.rewards_B))

    def mean_B(self) -> Tensor:
        return self.sum_B(self.rewards_B) / self.count_B().clamp(min=1)

"""Advantages from the comparison of rollouts within their group. B rows, R response tokens.

A rollout whose loop returned several outputs has one row for each, its branches. Every statistic counts a rollout once:
its branches share its weight, and its reward is the mean of their rewards.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from agent_loop.rollout.batch import RolloutBatch

EPSILON = 1e-6
"""Keeps the division by a standard deviation finite."""


def grpo_advantages(
    rewards_B: Tensor, *, groups_B: Tensor, rollouts_B: Tensor | None = None, norm_by_std: bool = True
) -> Tensor:
    """Return the advantage of each row over its group: `(r - mean(group)) / (std(group) + EPSILON)`, float32.

    The formula is that of DeepSeekMath (arXiv 2402.03300, section 4.1.2); without the division it is that of
    Dr. GRPO (arXiv 2503.20783). The mean and the standard deviation are over rollouts. The latter is the sample's
    (divided by n - 1), with the mean squared deviation of a rollout's branches as that of the rollout.

    Args:
        rewards_B: Reward of each row. A row with NaN counts in no statistic and gets 0.
        groups_B: Number of the group of each row.
        rollouts_B: Number, within the group, of the rollout of each row. None: each row is a rollout.
        norm_by_std: Divide by the standard deviation.

    A group with fewer than two rollouts, or without two different rewards, gets exactly 0.
    """
    return compared_rewards(
        rewards_B, groups_B=groups_B, rollouts_B=rollouts_B, norm_by_std=norm_by_std
    ).float()


def compared_rewards(
    rewards_B: Tensor, *, groups_B: Tensor, rollouts_B: Tensor | None = None, norm_by_std: bool = True
) -> Tensor:
    """Return the result of `grpo_advantages` in float64, for sums of several."""
    group = _Groups.of_rows(rewards_B, groups_B, rollouts_B)
    return torch.where(group.has_signal_B, group.compared_B(norm_by_std=norm_by_std), 0.0)


def rloo_advantages(rewards_B: Tensor, *, groups_B: Tensor, rollouts_B: Tensor | None = None) -> Tensor:
    """Return the advantage of each row over the mean of the other rollouts of its group, float32.

    The formula is that of REINFORCE leave-one-out (arXiv 2402.14740): `(r - mean(group)) * n / (n - 1)` for n rollouts
    with one row each. For a branch, r is its own reward; no branch of its rollout is in the mean that it is
    compared with.

    The arguments are those of `grpo_advantages`.

    A group with fewer than two rollouts, or without two different rewards, gets exactly 0.
    """
    group = _Groups.of_rows(rewards_B, groups_B, rollouts_B)
    rollout_means_B = group.rewards_B
    if rollouts_B is not None:
        rollout_means_B = _Groups(rewards_B, pair_numbers(groups_B, rollouts_B), group.weights_B).mean_B
    over_others_B = (rollout_means_B - group.mean_B) * group.count_B / (group.count_B - 1).clamp(min=1)
    advantages_B = over_others_B + (group.rewards_B - rollout_means_B)
    return torch.where(group.has_signal_B, advantages_B, 0.0).float()


def turn_advantages(
    turn_rewards_BR: Tensor,
    *,
    is_rewarded_BR: Tensor,
    groups_B: Tensor,
    rollouts_B: Tensor | None = None,
    norm_by_std: bool = True,
) -> Tensor:
    """Return the process advantage of each token: of its turn and later turns, against the group; [B, R] float32.

    The formula is that of DeepSeekMath for process supervision (arXiv 2402.03300, section 4.1.3): each reward is
    centred and divided by the standard deviation of all rewards of turns in its group. A token gets the sum of the
    results at it and after it.

    Args:
        turn_rewards_BR: Reward of each turn, at its last token.
        is_rewarded_BR: Bool: tokens at which a turn has a reward, even if it is 0.

    The other arguments are those of `grpo_advantages`.

    A group without two different rewards gets exactly 0.
    """
    scores_BR = compared_turns(
        turn_rewards_BR,
        is_rewarded_BR=is_rewarded_BR,
        groups_B=groups_B,
        rollouts_B=rollouts_B,
        norm_by_std=norm_by_std,
    )
    return scores_BR.flip(1).cumsum(1).flip(1)


def compared_turns(
    turn_rewards_BR: Tensor,
    *,
    is_rewarded_BR: Tensor,
    groups_B: Tensor,
    rollouts_B: Tensor | None = None,
    norm_by_std: bool,
) -> Tensor:
    """Return the rewards of turns minus the mean of their group; [B, R] float32, 0 at other tokens.

    The arguments are those of `turn_advantages`. A turn of a rollout counts as one divided by the number of the
    rollout's branches that have rewards of turns, so that a rollout has as many turns as its mean branch.
    """
    rows_N, places_N = is_rewarded_BR.nonzero(as_tuple=True)
    weights_B = share_weights(is_rewarded_BR.any(dim=1), groups_B=groups_B, rollouts_B=rollouts_B)
    group = _Groups(turn_rewards_BR[rows_N, places_N], groups_B[rows_N], weights_B[rows_N])
    compared_N = group.compared_B(norm_by_std=norm_by_std)
    scores_BR = torch.zeros(turn_rewards_BR.shape, dtype=torch.float32)
    scores_BR[rows_N, places_N] = torch.where(group.differs_B, compared_N, 0.0).float()
    return scores_BR


def step_advantages(
    returns_BT: Tensor,
    *,
    anchors_BT: Tensor,
    is_turn_BT: Tensor,
    groups_B: Tensor,
    rollouts_B: Tensor | None = None,
    norm_by_std: bool = True,
) -> Tensor:
    """Return the advantage of each turn over the turns of its group with the same anchor, [B, T] float32.

    The formula is that of `grpo_advantages`, over the turns of all rollouts of the group. A turn of a rollout counts as
    one divided by the number of the rollout's branches that have a turn with this anchor.

    Args:
        returns_BT: Return of each turn.
        anchors_BT: Number that comparable turns share.
        is_turn_BT: Bool: turns that count. The others get 0.

    The other arguments are those of `grpo_advantages`.

    A turn that is compared with no other turn, or with equal returns only, gets exactly 0.
    """
    rows_N, turns_N = is_turn_BT.nonzero(as_tuple=True)
    anchors_N = pair_numbers(groups_B[rows_N], anchors_BT[rows_N, turns_N])
    weights_N = torch.ones(len(rows_N), dtype=torch.float64)
    if rollouts_B is not None:
        keys_N = pair_numbers(rollouts_B[rows_N], anchors_N)
        rows_of_keys_2M: Tensor = cast(Any, torch).unique(torch.stack([keys_N, rows_N]), dim=1)
        weights_N /= torch.bincount(rows_of_keys_2M[0])[keys_N]
    group = _Groups(returns_BT[rows_N, turns_N], anchors_N, weights_N)
    compared_N = group.compared_B(norm_by_std=norm_by_std)
    advantages_BT = torch.zeros(returns_BT.shape, dtype=torch.float32)
    advantages_BT[rows_N, turns_N] = torch.where(group.has_signal_B, compared_N, 0.0).float()
    return advantages_BT


def has_signal(rewards_B: Tensor, *, groups_B: Tensor, rollouts_B: Tensor | None = None) -> Tensor:
    """Return for each row whether a comparison with its group has a signal; bool [B].

    It has one if the row and another rollout of the group are scored, and not all rewards of the group are equal.
    The arguments are those of `grpo_advantages`.
    """
    return _Groups.of_rows(rewards_B, groups_B, rollouts_B).has_signal_B


def pair_numbers(first_B: Tensor, second_B: Tensor) -> Tensor:
    """Return for each pair of numbers a number that only equal pairs share; int64 [B]."""
    pairs_B2 = torch.stack([first_B, second_B], dim=1)
    return cast(Any, torch).unique(pairs_B2, dim=0, return_inverse=True)[1]


def share_weights(counts_B: Tensor, *, groups_B: Tensor, rollouts_B: Tensor | None = None) -> Tensor:
    """Return the weight of each row, so that the rows of a rollout share a weight of 1; [B] float64.

    Args:
        counts_B: Bool: rows that count; the weight of other rows is 0.
        groups_B: Number of the group of each row.
        rollouts_B: Number, within the group, of the rollout of each row. None: each row is a rollout.
    """
    counts_B = counts_B.double()
    if rollouts_B is None:
        return counts_B
    numbers_B = pair_numbers(groups_B, rollouts_B)
    num_rows = torch.zeros_like(counts_B).index_add_(0, numbers_B, counts_B)[numbers_B]
    return counts_B / num_rows.clamp(min=1)


class _Groups:
    """Weighted statistics of the rewards of each row's group, in float64: equal rewards must stay equal."""

    def __init__(self, rewards_B: Tensor, groups_B: Tensor, weights_B: Tensor) -> None:
        self.rewards_B = rewards_B.double()
        self.weights_B = weights_B
        self._counts_B = weights_B > 0
        self._index_B: Tensor = cast(Any, torch).unique(groups_B, return_inverse=True)[1]
        self.count_B = self._sum_B(torch.ones_like(self.rewards_B))
        """Sum of the weights, which is the number of rollouts."""
        self.mean_B = self._sum_B(self.rewards_B) / self.count_B.clamp(min=1)
        highest_B = self._reduce_B(self.rewards_B, "amax", fill=-torch.inf)
        lowest_B = self._reduce_B(self.rewards_B, "amin", fill=torch.inf)
        self.differs_B = self._counts_B & (highest_B > lowest_B)
        """Bool: rows that count, in groups whose rewards are not all equal."""
        self.has_signal_B = self.differs_B & (self.count_B > 1 + 1e-6)  # a sum of shares may be a bit over 1
        """Bool: those of groups in which another rollout counts too."""

    @classmethod
    def of_rows(cls, rewards_B: Tensor, groups_B: Tensor, rollouts_B: Tensor | None) -> _Groups:
        """Return the groups of rows, where a row with NaN does not count."""
        weights_B = share_weights(~rewards_B.isnan(), groups_B=groups_B, rollouts_B=rollouts_B)
        return cls(rewards_B, groups_B, weights_B)

    def compared_B(self, *, norm_by_std: bool) -> Tensor:
        """Return the rewards minus the mean of their group, with `norm_by_std` divided by its standard deviation."""
        centred_B = torch.where(self._counts_B, self.rewards_B - self.mean_B, 0.0)
        if not norm_by_std:
            return centred_B
        variance_B = self._sum_B(centred_B**2) / (self.count_B - 1).clamp(min=1)
        return centred_B / (variance_B.sqrt() + EPSILON)

    def _sum_B(self, values_B: Tensor) -> Tensor:
        return self._reduce_B(values_B * self.weights_B, "sum", fill=0.0)

    def _reduce_B(self, values_B: Tensor, operation: str, *, fill: float) -> Tensor:
        values_B = torch.where(self._counts_B, values_B, fill)
        per_group = torch.full((len(values_B),), fill, dtype=values_B.dtype, device=values_B.device)
        return per_group.scatter_reduce(0, self._index_B, values_B, operation)[self._index_B]


def rollouts_of_rows(batch: RolloutBatch) -> Tensor:
    """Return for each row the number of its rollout, counted from 0 in the order of their first rows; int64 [B].

    Rows without a branch number are rollouts of their own.
    """
    columns: list[list[int]] = [batch[name].tolist() for name in ("group", "rollout", "branch")]
    numbers: dict[tuple[int, int, int], int] = {}
    found: list[int] = []
    for row, (group, rollout, branch) in enumerate(zip(*columns, strict=True)):
        key = (group, rollout, row if branch < 0 else -1)
        found.append(numbers.setdefault(key, len(numbers)))
    return torch.tensor(found, dtype=torch.int64)


def per_rollout(values_B: Tensor, *, rollouts_B: Tensor) -> Tensor:
    """Return for each row the sum of the values of all rows of its rollout, [B]."""
    return torch.zeros_like(values_B).index_add_(0, rollouts_B, values_B)[rollouts_B]


def branch_weights(rollouts_B: Tensor) -> Tensor:
    """Return 1 divided by the number of rows of each row's rollout, [B] float64."""
    ones_B = torch.ones(rollouts_B.shape, dtype=torch.float64)
    return ones_B / per_rollout(ones_B, rollouts_B=rollouts_B)

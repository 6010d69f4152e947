"""Credit for turns from new continuations of a trajectory. B rows, R response tokens, T turns at most."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from agent_loop.config import AlgorithmConfig
from agent_loop.training.advantages.estimators import Advantages
from agent_loop.training.advantages.groups import has_signal, pair_numbers, share_weights
from agent_loop.training.advantages.rewards import Rewards
from agent_loop.training.advantages.turns import Turns
from agent_loop.training.branches import per_rollout
from agent_loop.training.registry import advantage_estimator

ROUNDING = 1e-12
"""Values that differ less are means of equal rewards."""


@advantage_estimator("fork", needs_turns=True, needs_forks=True)
def fork(rewards: Rewards, *, config: AlgorithmConfig, turns: Turns) -> Advantages:
    """Return for each turn the value of the next known state minus that of the last known state (VinePPO).

    The formula is that of VinePPO (arXiv 2410.01679, equation 7, with a discount of 1), for stretches of turns between
    two states of known value. The value of a state from which continuations were sampled is the mean of their rewards.
    The value of the prompt is the mean reward of the other rollouts of the group, without continuations. The value of
    the end is the reward. The stretch before the first known state gets 0. A trajectory without continuations thus gets
    its advantage of `rloo`.

    The own turns of a continuation get its reward minus the mean of the rewards of the other continuations of the state
    and of the trajectory that it forks; 0 if `config.fork.train` is false.
    """
    rollouts = _Rollouts(rewards, turns)
    totals_B = _totals(rewards, turns, rollouts)
    num_turns_B = turns.is_turn_BT.sum(dim=1)
    values_BT = torch.full((len(totals_B), turns.states_BT.shape[1] + 1), torch.nan, dtype=torch.float64)
    of_mains_B = torch.where(turns.forked_B < 0, totals_B, torch.nan)
    values_BT[:, 0] = _values_of_prompts(of_mains_B, rewards)
    values_BT[torch.arange(len(totals_B)), num_turns_B] = totals_B
    for (main, turn), rows in rollouts.states(~totals_B.isnan()).items():
        sum_of_rewards = totals_B[rows].sum()
        values_BT[main, turn] = sum_of_rewards / len(rows)
        if config.fork.train:
            values_BT[rows, turn] = (sum_of_rewards + totals_B[main] - totals_B[rows]) / len(rows)
    advantages_BR = turns.per_token(_differences(values_BT))
    advantages_BR = torch.where(rewards.mask_BR.bool(), advantages_BR, 0.0)
    in_groups_B = has_signal(of_mains_B, groups_B=rewards.groups_B, rollouts_B=rewards.rollouts_B)
    return Advantages(advantages_BR, in_groups_B | (advantages_BR != 0).any(dim=1))


def _totals(rewards: Rewards, turns: Turns, rollouts: _Rollouts) -> Tensor:
    """Return the total reward of each row, [B] float64; NaN if it was not scored.

    The total of a continuation includes the penalties of the tokens that it shares, which are trained in another row.
    """
    totals_B = rewards.per_row().clone()
    for row, main in rollouts.main_of.items():
        is_shared_R = (turns.numbers_BR[main] < turns.forked_B[row]) & rewards.mask_BR[main].bool()
        totals_B[row] -= rewards.penalties_BR[main][is_shared_R].double().sum()
    return totals_B


def _values_of_prompts(of_mains_B: Tensor, rewards: Rewards) -> Tensor:
    """Return the mean reward of the other rollouts of each row's group, [B]; NaN if there is no other, or no reward."""
    groups_B, rollouts_B = rewards.groups_B, rewards.rollouts_B
    rollouts_B = torch.arange(len(groups_B)) if rollouts_B is None else rollouts_B
    weights_B = share_weights(~of_mains_B.isnan(), groups_B=groups_B, rollouts_B=rollouts_B)
    shares_B = weights_B * of_mains_B.nan_to_num()
    own_B = per_rollout(shares_B, rollouts_B=pair_numbers(groups_B, rollouts_B))
    of_groups_B, num_rollouts_B = (
        per_rollout(each_B, rollouts_B=pair_numbers(groups_B, groups_B)) for each_B in (shares_B, weights_B)
    )
    means_B = (of_groups_B - own_B) / (num_rollouts_B - 1)
    return torch.where((num_rollouts_B > 1.5) & ~of_mains_B.isnan(), means_B, torch.nan)


class _Rollouts:
    """Rows of the trajectories that are forked, and of their continuations."""

    def __init__(self, rewards: Rewards, turns: Turns) -> None:
        numbers_B = torch.arange(len(rewards.groups_B)) if rewards.rollouts_B is None else rewards.rollouts_B
        numbers: list[int] = cast(Any, numbers_B).tolist()
        self._forked: list[int] = cast(Any, turns.forked_B).tolist()
        mains = {number: row for row, number in enumerate(numbers) if self._forked[row] < 0}
        self.main_of = {
            row: mains[number]
            for row, number in enumerate(numbers)
            if self._forked[row] >= 0 and number in mains
        }
        """Row of the trajectory that a continuation forks, by the row of the continuation."""

    def states(self, is_scored_B: Tensor) -> dict[tuple[int, int], list[int]]:
        """Return the rows of the scored continuations of each state: a row of a scored trajectory, and a turn."""
        states: dict[tuple[int, int], list[int]] = {}
        for row, main in self.main_of.items():
            if is_scored_B[row] and is_scored_B[main]:
                states.setdefault((main, self._forked[row]), []).append(row)
        return states


def _differences(values_BT: Tensor) -> Tensor:
    """Return the next known value after each turn minus the last known value before it, [B, T]; 0 without both.

    Args:
        values_BT: Value of the state before each turn, and of the end; NaN if it is not known. Shape [B, T + 1].
    """
    before_BT, after_BT = values_BT.clone(), values_BT.clone()
    for turn in range(1, values_BT.shape[1]):
        before_BT[:, turn] = torch.where(
            before_BT[:, turn].isnan(), before_BT[:, turn - 1], before_BT[:, turn]
        )
    for turn in reversed(range(values_BT.shape[1] - 1)):
        after_BT[:, turn] = torch.where(after_BT[:, turn].isnan(), after_BT[:, turn + 1], after_BT[:, turn])
    after_BT, before_BT = after_BT[:, 1:], before_BT[:, :-1]
    is_rounding_BT = torch.isclose(after_BT, before_BT, rtol=ROUNDING, atol=ROUNDING)
    return torch.where(is_rounding_BT, 0.0, after_BT - before_BT).nan_to_num(nan=0.0)

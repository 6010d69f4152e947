"""The built-in advantage estimators. B rows, R response tokens, T turns at most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from agent_loop.config import AlgorithmConfig
from agent_loop.config.training import OUTCOME
from agent_loop.training.advantages.groups import (
    compared_rewards,
    grpo_advantages,
    has_signal,
    pair_numbers,
    per_rollout,
    rloo_advantages,
    share_weights,
    step_advantages,
    turn_advantages,
)
from agent_loop.training.advantages.rewards import Rewards
from agent_loop.training.advantages.turns import Turns, discounted_returns, gae, turn_returns, whiten
from agent_loop.training.registry import advantage_estimator


@dataclass(frozen=True, slots=True)
class Advantages:
    """Result of an estimator that returns more than the advantages."""

    advantages: Tensor
    """[B] or [B, R]."""
    has_signal_B: Tensor | None = None
    """Bool: rows that can be learned from. None: all scored rows, or the scored rows of groups whose rewards differ if
    the estimator compares in groups."""
    returns_BR: Tensor | None = None
    """Returns that the critic is trained to predict; None without a critic."""
    whiten: bool = False
    """Whiten the advantages over all tokens that are trained."""


@advantage_estimator("grpo", compares_in_group=True)
def grpo(rewards: Rewards, *, config: AlgorithmConfig) -> Advantages:
    """Compare each reward with its group (DeepSeekMath, arXiv 2402.03300), and add the advantages of turns."""
    scores_B = rewards.outcome_B - rewards.penalties_BR.sum(dim=1)
    groups_B, rollouts_B = rewards.groups_B, rewards.rollouts_B
    norm_by_std = config.norm_adv_by_std_in_grpo
    advantages_B = grpo_advantages(
        scores_B, groups_B=groups_B, rollouts_B=rollouts_B, norm_by_std=norm_by_std
    )
    advantages_BR = advantages_B[:, None].expand(rewards.mask_BR.shape)
    signal_B = has_signal(scores_B, groups_B=groups_B, rollouts_B=rollouts_B)
    if rewards.turn_weight:
        turns_BR = rewards.turn_weight * turn_advantages(
            rewards.turns_BR,
            is_rewarded_BR=rewards.has_turn_BR,
            groups_B=groups_B,
            rollouts_B=rollouts_B,
            norm_by_std=norm_by_std,
        )
        advantages_BR, signal_B = advantages_BR + turns_BR, signal_B | (turns_BR != 0).any(dim=1)
    return Advantages(advantages_BR, signal_B)


@advantage_estimator("rloo", compares_in_group=True)
def rloo(rewards: Rewards, *, config: AlgorithmConfig) -> Tensor:
    """Subtract the mean reward of the other rollouts of the group (RLOO, arXiv 2402.14740)."""
    return rloo_advantages(rewards.per_row(), groups_B=rewards.groups_B, rollouts_B=rewards.rollouts_B)


@advantage_estimator("remax", needs_greedy_rollouts=True)
def remax(rewards: Rewards, *, config: AlgorithmConfig, baselines_B: Tensor) -> Advantages:
    """Subtract the reward of a greedy rollout of the same prompt (ReMax, arXiv 2310.10505)."""
    advantages_B = rewards.per_row() - baselines_B
    signal_B = ~advantages_B.isnan()
    return Advantages(torch.where(signal_B, advantages_B, 0.0), signal_B)


@advantage_estimator("reinforce_plus_plus")
def reinforce_plus_plus(rewards: Rewards, *, config: AlgorithmConfig) -> Advantages:
    """Return whitened discounted returns (REINFORCE++, arXiv 2501.03262)."""
    return Advantages(_returns(rewards, gamma=config.gamma), whiten=True)


@advantage_estimator("reinforce_plus_plus_baseline", compares_in_group=True)
def reinforce_plus_plus_baseline(rewards: Rewards, *, config: AlgorithmConfig) -> Advantages:
    """Return whitened discounted returns of rewards minus the mean of their group (REINFORCE++-baseline)."""
    centred = rewards.centred()
    has_outcome_signal_B = has_signal(
        rewards.outcome_B, groups_B=rewards.groups_B, rollouts_B=rewards.rollouts_B
    )
    signal_B = has_outcome_signal_B | (centred.per_token() != 0).any(dim=1)
    return Advantages(_returns(centred, gamma=config.gamma), signal_B, whiten=True)


@advantage_estimator("gdpo", compares_in_group=True)
def gdpo(rewards: Rewards, *, config: AlgorithmConfig) -> Advantages:
    """Normalize each part of the reward in its group, and the weighted sum over the batch (GDPO, arXiv 2601.05242).

    The formula of each part is that of `grpo_advantages`. The mean and the standard deviation of the batch are over its
    scored rollouts, without groups that are dropped because no part has a signal. A row without a number for a part
    counts in no statistic of the part, and gets 0 for it.
    """
    groups_B, rollouts_B = rewards.groups_B, rewards.rollouts_B
    sum_B = torch.zeros(len(groups_B), dtype=torch.float64)
    signal_B = torch.zeros(len(groups_B), dtype=torch.bool)
    for name, weight in config.reward_parts.items():
        part_B = rewards.per_row() if name == OUTCOME else rewards.parts[name]
        sum_B += weight * compared_rewards(part_B, groups_B=groups_B, rollouts_B=rollouts_B)
        if weight:
            signal_B |= has_signal(part_B, groups_B=groups_B, rollouts_B=rollouts_B)
    counts_B = rewards.is_scored_B & (signal_B | (not config.drop_zero_variance_groups))
    weights_B = share_weights(counts_B, groups_B=rewards.prompts_B, rollouts_B=rollouts_B)
    advantages_B1 = whiten(sum_B[:, None], mask_BR=counts_B[:, None], weights_B=weights_B)
    return Advantages(advantages_B1[:, 0], signal_B)


@advantage_estimator("turn_grpo", compares_in_group=True, needs_turns=True)
def turn_grpo(rewards: Rewards, *, config: AlgorithmConfig, turns: Turns) -> Advantages:
    """Compare the discounted return of each turn with those of the same turn of the group's other rollouts.

    Turns of equal number are compared, as in MT-GRPO (arXiv 2505.11821), by their discounted returns, as in GTPO (arXiv
    2511.14846). A turn that no other rollout reached gets 0.
    """
    numbers_BT = torch.arange(turns.states_BT.shape[1]).expand(turns.states_BT.shape)
    advantages_BR = _compare_turns(rewards, turns, anchors_BT=numbers_BT, config=config)
    return Advantages(advantages_BR, (advantages_BR != 0).any(dim=1))


@advantage_estimator("gigpo", compares_in_group=True, needs_turns=True)
def gigpo(rewards: Rewards, *, config: AlgorithmConfig, turns: Turns) -> Advantages:
    """Add the advantage of a turn among turns in the same state to that of its trajectory (GiGPO, arXiv 2505.10978).

    Trajectories are compared by their total rewards. Turns of one group with equal states are compared by their
    discounted returns. `collect_turns` says which states are equal: those with equal
    observations, or with equal values under `config.anchor_state`. A turn in a state of its own gets 0 for it.
    """
    groups_B, rollouts_B = rewards.groups_B, rewards.rollouts_B
    total_B = rewards.per_row()
    advantages_B = grpo_advantages(
        total_B, groups_B=groups_B, rollouts_B=rollouts_B, norm_by_std=config.norm_adv_by_std_in_grpo
    )
    steps_BR = _compare_turns(rewards, turns, anchors_BT=turns.states_BT, config=config)
    steps_BR = config.step_advantage_weight * steps_BR
    signal_B = has_signal(total_B, groups_B=groups_B, rollouts_B=rollouts_B)
    return Advantages(advantages_B[:, None] + steps_BR, signal_B | (steps_BR != 0).any(dim=1))


@advantage_estimator("gae", needs_critic=True)
def gae_with_critic(rewards: Rewards, *, config: AlgorithmConfig, values_BR: Tensor) -> Advantages:
    """Return generalised advantage estimates (arXiv 1506.02438) against the values of a critic."""
    advantages_BR = gae(
        rewards.per_token(),
        values_BR=values_BR,
        mask_BR=rewards.mask_BR,
        gamma=config.gamma,
        lam=config.lam,
    )
    returns_BR = (advantages_BR + values_BR).float()
    return Advantages(advantages_BR, returns_BR=returns_BR, whiten=config.whiten_advantages)


def _compare_turns(rewards: Rewards, turns: Turns, *, anchors_BT: Tensor, config: AlgorithmConfig) -> Tensor:
    """Return the advantage of each trained token's turn among the turns of its group with the same anchor, [B, R]."""
    advantages_BT = step_advantages(
        turn_returns(rewards, turns, gamma=config.gamma),
        anchors_BT=anchors_BT,
        is_turn_BT=turns.is_turn_BT & rewards.is_scored_B[:, None],
        groups_B=rewards.groups_B,
        rollouts_B=rewards.rollouts_B,
        norm_by_std=config.norm_adv_by_std_in_grpo,
    )
    return torch.where(rewards.mask_BR.bool(), turns.per_token(advantages_BT), 0.0)


def _returns(rewards: Rewards, *, gamma: float) -> Tensor:
    return discounted_returns(rewards.per_token(), mask_BR=rewards.mask_BR, gamma=gamma)


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
    main_of, forked = _mains(rewards, turns), cast(list[int], cast(Any, turns.forked_B).tolist())
    totals_B = _totals(rewards, turns, main_of)
    num_turns_B = turns.is_turn_BT.sum(dim=1)
    values_BT = torch.full((len(totals_B), turns.states_BT.shape[1] + 1), torch.nan, dtype=torch.float64)
    of_mains_B = torch.where(turns.forked_B < 0, totals_B, torch.nan)
    values_BT[:, 0] = _values_of_prompts(of_mains_B, rewards)
    values_BT[torch.arange(len(totals_B)), num_turns_B] = totals_B
    continuations: dict[tuple[int, int], list[int]] = {}  # rows that continue a scored trajectory at a turn
    for row, main in main_of.items():
        if not totals_B[[row, main]].isnan().any():
            continuations.setdefault((main, forked[row]), []).append(row)
    for (main, turn), rows in continuations.items():
        sum_of_rewards = totals_B[rows].sum()
        values_BT[main, turn] = sum_of_rewards / len(rows)
        if config.fork.train:
            values_BT[rows, turn] = (sum_of_rewards + totals_B[main] - totals_B[rows]) / len(rows)
    advantages_BR = turns.per_token(_differences(values_BT))
    advantages_BR = torch.where(rewards.mask_BR.bool(), advantages_BR, 0.0)
    in_groups_B = has_signal(of_mains_B, groups_B=rewards.groups_B, rollouts_B=rewards.rollouts_B)
    return Advantages(advantages_BR, in_groups_B | (advantages_BR != 0).any(dim=1))


def _mains(rewards: Rewards, turns: Turns) -> dict[int, int]:
    """Return the row of the trajectory that a continuation forks, by the row of the continuation."""
    numbers = [cast(Any, each_B).tolist() for each_B in (rewards.rollouts_B, turns.forked_B)]
    pairs: list[tuple[int, int]] = list(zip(*numbers, strict=True))
    mains = {rollout: row for row, (rollout, forked) in enumerate(pairs) if forked < 0}
    return {
        row: mains[rollout] for row, (rollout, forked) in enumerate(pairs) if forked >= 0 and rollout in mains
    }


def _totals(rewards: Rewards, turns: Turns, main_of: Mapping[int, int]) -> Tensor:
    """Return the total reward of each row, [B] float64; NaN if it was not scored.

    The total of a continuation includes the penalties of the tokens that it shares, which are trained in another row.
    """
    totals_B = rewards.per_row().clone()
    for row, main in main_of.items():
        is_shared_R = (turns.numbers_BR[main] < turns.forked_B[row]) & rewards.mask_BR[main].bool()
        totals_B[row] -= rewards.penalties_BR[main][is_shared_R].double().sum()
    return totals_B


def _values_of_prompts(of_mains_B: Tensor, rewards: Rewards) -> Tensor:
    """Return the mean reward of the other rollouts of each row's group, [B]; NaN if there is no other, or no reward."""
    groups_B, rollouts_B = rewards.groups_B, rewards.rollouts_B
    weights_B = share_weights(~of_mains_B.isnan(), groups_B=groups_B, rollouts_B=rollouts_B)
    shares_B = weights_B * of_mains_B.nan_to_num()
    own_B = per_rollout(shares_B, rollouts_B=pair_numbers(groups_B, rollouts_B))
    of_groups_B, num_rollouts_B = (
        per_rollout(each_B, rollouts_B=pair_numbers(groups_B, groups_B)) for each_B in (shares_B, weights_B)
    )
    means_B = (of_groups_B - own_B) / (num_rollouts_B - 1)
    return torch.where((num_rollouts_B > 1.5) & ~of_mains_B.isnan(), means_B, torch.nan)


def _differences(values_BT: Tensor) -> Tensor:
    """Return the next known value after each turn minus the last known value before it, [B, T]; 0 without both.

    The values, [B, T + 1], are those of the states before each turn and of the end; NaN if they are not known.
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

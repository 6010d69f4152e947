"""The built-in advantage estimators. B rows, R response tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agent_loop.config import AlgorithmConfig
from agent_loop.config.algorithm import OUTCOME
from agent_loop.training.advantages.groups import (
    compared_rewards,
    grpo_advantages,
    has_signal,
    rloo_advantages,
    share_weights,
    step_advantages,
    turn_advantages,
)
from agent_loop.training.advantages.rewards import Rewards
from agent_loop.training.advantages.tokens import discounted_returns, gae, whiten
from agent_loop.training.advantages.turns import Turns, turn_returns
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
    prompts_B = groups_B if rewards.prompts_B is None else rewards.prompts_B
    weights_B = share_weights(counts_B, groups_B=prompts_B, rollouts_B=rollouts_B)
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

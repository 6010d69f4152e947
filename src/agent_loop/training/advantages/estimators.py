"""The built-in advantage estimators. B rows, R response tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agent_loop.config import AlgorithmConfig
from agent_loop.training.advantages.groups import (
    grpo_advantages,
    has_signal,
    rloo_advantages,
    turn_advantages,
)
from agent_loop.training.advantages.rewards import Rewards
from agent_loop.training.advantages.tokens import discounted_returns, gae
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


def _returns(rewards: Rewards, *, gamma: float) -> Tensor:
    return discounted_returns(rewards.per_token(), mask_BR=rewards.mask_BR, gamma=gamma)

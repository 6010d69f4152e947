"""From rewards to what each token is to learn, by the estimator that the configuration names."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agent_loop.config import AlgorithmConfig
from agent_loop.training.advantages.groups import (
    grpo_advantages,
    has_signal,
    rloo_advantages,
    share_weights,
    turn_advantages,
)
from agent_loop.training.advantages.rewards import Rewards
from agent_loop.training.advantages.tokens import discounted_returns, gae, whiten

COMPARES_IN_GROUP = frozenset({"grpo", "rloo", "reinforce_plus_plus_baseline"})
"""Estimators for which a group of equal rewards carries no signal, and a group of one neither."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a batch teaches."""

    advantages_BR: Tensor
    """float32; a token's value counts where the model said it and its row is kept."""
    has_signal_B: Tensor
    """Bool: the trajectory can be told from what it is compared with."""
    keep_B: Tensor
    """Bool: rows to train on."""
    returns_BR: Tensor | None = None
    """What the critic is to predict, float32; None without one."""


def estimate_advantages(
    rewards: Rewards,
    *,
    config: AlgorithmConfig,
    is_allowed_B: Tensor | None = None,
    values_BR: Tensor | None = None,
    baselines_B: Tensor | None = None,
) -> Estimate:
    """The advantages of a batch.

    Args:
        rewards: What was earned.
        config: Which estimator, and its settings.
        is_allowed_B: Bool: rows that may be trained; None is all. The others still count in their groups.
        values_BR: What the critic expects just before each token; `gae` needs it.
        baselines_B: What a greedy trajectory of the same prompt earned, NaN where nothing scored it; `remax` needs it.

    Raises:
        ValueError: `gae` has no values, or `remax` no baselines.
    """
    estimator, returns_BR = config.adv_estimator, None
    match estimator:
        case "grpo":
            compared_BR, signal_B = _grpo(rewards, norm_by_std=config.norm_adv_by_std_in_grpo)
        case "rloo":
            compared_BR, signal_B = _rloo(rewards)
        case "remax":
            compared_BR, signal_B = _remax(rewards, baselines_B)
        case "reinforce_plus_plus":
            compared_BR, signal_B = _returns(rewards, gamma=config.gamma), rewards.is_scored_B
        case "reinforce_plus_plus_baseline":
            compared_BR, signal_B = _returns_in_group(rewards, gamma=config.gamma)
        case "gae":
            compared_BR, returns_BR = _gae(rewards, values_BR, gamma=config.gamma, lam=config.lam)
            signal_B = rewards.is_scored_B
    keep_B = rewards.is_scored_B if is_allowed_B is None else rewards.is_scored_B & is_allowed_B
    if config.drop_zero_variance_groups or estimator not in COMPARES_IN_GROUP:
        keep_B = keep_B & signal_B
    if estimator.startswith("reinforce") or (estimator == "gae" and config.whiten_advantages):
        is_trained_BR = rewards.mask_BR.bool() & keep_B[:, None]
        weights_B = share_weights(
            is_trained_BR.any(dim=1), groups_B=rewards.groups_B, rollouts_B=rewards.rollouts_B
        )
        compared_BR = whiten(compared_BR, mask_BR=is_trained_BR, weights_B=weights_B)
    return Estimate(
        advantages_BR=compared_BR.float(), has_signal_B=signal_B, keep_B=keep_B, returns_BR=returns_BR
    )


def _grpo(rewards: Rewards, *, norm_by_std: bool) -> tuple[Tensor, Tensor]:
    scores_B = rewards.outcome_B - rewards.penalties_BR.sum(dim=1)
    groups_B, rollouts_B = rewards.groups_B, rewards.rollouts_B
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
    return advantages_BR, signal_B


def _rloo(rewards: Rewards) -> tuple[Tensor, Tensor]:
    totals_B = rewards.per_row()
    groups_B, rollouts_B = rewards.groups_B, rewards.rollouts_B
    advantages_B = rloo_advantages(totals_B, groups_B=groups_B, rollouts_B=rollouts_B)
    signal_B = has_signal(totals_B, groups_B=groups_B, rollouts_B=rollouts_B)
    return advantages_B[:, None].expand(rewards.mask_BR.shape), signal_B


def _remax(rewards: Rewards, baselines_B: Tensor | None) -> tuple[Tensor, Tensor]:
    """The reward less that of a greedy trajectory (ReMax, arXiv 2310.10505)."""
    if baselines_B is None:
        raise ValueError(
            "adv_estimator is remax, which needs baselines_B; give a greedy trajectory's rewards"
        )
    advantages_B = rewards.per_row() - baselines_B
    signal_B = ~advantages_B.isnan()
    return torch.where(signal_B, advantages_B, 0.0)[:, None].expand(rewards.mask_BR.shape), signal_B


def _returns(rewards: Rewards, *, gamma: float) -> Tensor:
    """REINFORCE++ (arXiv 2501.03262), before it is whitened."""
    return discounted_returns(rewards.per_token(), mask_BR=rewards.mask_BR, gamma=gamma)


def _returns_in_group(rewards: Rewards, *, gamma: float) -> tuple[Tensor, Tensor]:
    """REINFORCE++-baseline (the same): each reward less its group's mean, before it is whitened."""
    centred = rewards.centred()
    has_outcome_signal_B = has_signal(
        rewards.outcome_B, groups_B=rewards.groups_B, rollouts_B=rewards.rollouts_B
    )
    signal_B = has_outcome_signal_B | (centred.per_token() != 0).any(dim=1)
    return _returns(centred, gamma=gamma), signal_B


def _gae(rewards: Rewards, values_BR: Tensor | None, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    if values_BR is None:
        raise ValueError("adv_estimator is gae, which needs values_BR; give what a critic expects")
    advantages_BR = gae(
        rewards.per_token(), values_BR=values_BR, mask_BR=rewards.mask_BR, gamma=gamma, lam=lam
    )
    return advantages_BR, (advantages_BR + values_BR).float()

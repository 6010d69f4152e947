"""Advantages from rewards: pure functions of tensors. B rows, R response tokens."""

from agent_loop.training.advantages.estimate import (
    BatchAdvantages,
    Estimator,
    estimate_advantages,
    estimator_needs,
    load_estimator,
)
from agent_loop.training.advantages.estimators import Advantages
from agent_loop.training.advantages.groups import (
    grpo_advantages,
    has_signal,
    rloo_advantages,
    share_weights,
    turn_advantages,
)
from agent_loop.training.advantages.rewards import Rewards, collect_rewards, overlong_penalty
from agent_loop.training.advantages.tokens import discounted_returns, gae, whiten

__all__ = [
    "Advantages",
    "BatchAdvantages",
    "Estimator",
    "Rewards",
    "collect_rewards",
    "discounted_returns",
    "estimate_advantages",
    "estimator_needs",
    "gae",
    "grpo_advantages",
    "has_signal",
    "load_estimator",
    "overlong_penalty",
    "rloo_advantages",
    "share_weights",
    "turn_advantages",
    "whiten",
]

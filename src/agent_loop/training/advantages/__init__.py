"""Rewards to advantages. Pure functions of tensors; B trajectories, R response tokens."""

from agent_loop.training.advantages.estimate import COMPARES_IN_GROUP, Estimate, estimate_advantages
from agent_loop.training.advantages.groups import (
    grpo_advantages,
    has_signal,
    rloo_advantages,
    turn_advantages,
)
from agent_loop.training.advantages.rewards import Rewards, collect_rewards, overlong_penalty
from agent_loop.training.advantages.tokens import discounted_returns, gae, whiten

__all__ = [
    "COMPARES_IN_GROUP",
    "Estimate",
    "Rewards",
    "collect_rewards",
    "discounted_returns",
    "estimate_advantages",
    "gae",
    "grpo_advantages",
    "has_signal",
    "overlong_penalty",
    "rloo_advantages",
    "turn_advantages",
    "whiten",
]

"""Advantages from rewards: pure functions of tensors. B rows, R response tokens."""

from agent_loop.training.advantages.estimate import (
    BatchAdvantages,
    Estimator,
    estimate_advantages,
    estimator_needs,
    load_estimator,
)
from agent_loop.training.advantages.estimators import Advantages
from agent_loop.training.advantages.fork import fork
from agent_loop.training.advantages.groups import (
    grpo_advantages,
    has_signal,
    rloo_advantages,
    share_weights,
    step_advantages,
    turn_advantages,
)
from agent_loop.training.advantages.parts import part_columns
from agent_loop.training.advantages.rewards import Rewards, collect_rewards, overlong_penalty
from agent_loop.training.advantages.sources import SourceEstimators, estimate_batch, load_estimators
from agent_loop.training.advantages.tokens import discounted_returns, gae, whiten
from agent_loop.training.advantages.turns import Turns, collect_turns, turn_returns

__all__ = [
    "Advantages",
    "BatchAdvantages",
    "Estimator",
    "Rewards",
    "SourceEstimators",
    "Turns",
    "collect_rewards",
    "collect_turns",
    "discounted_returns",
    "estimate_advantages",
    "estimate_batch",
    "estimator_needs",
    "fork",
    "gae",
    "grpo_advantages",
    "has_signal",
    "load_estimator",
    "load_estimators",
    "overlong_penalty",
    "part_columns",
    "rloo_advantages",
    "share_weights",
    "step_advantages",
    "turn_advantages",
    "turn_returns",
    "whiten",
]

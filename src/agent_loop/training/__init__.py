"""Training: advantages, losses, optimiser steps, checkpoints.

The names below are for estimators and losses of users. Each is imported at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_loop.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from agent_loop.training.advantages.estimators import Advantages
    from agent_loop.training.advantages.groups import (
        grpo_advantages,
        has_signal,
        rloo_advantages,
        share_weights,
        step_advantages,
        turn_advantages,
    )
    from agent_loop.training.advantages.rewards import Rewards
    from agent_loop.training.advantages.turns import Turns, discounted_returns, gae, turn_returns, whiten
    from agent_loop.training.losses.policy import TokenLoss, clipped_loss
    from agent_loop.training.losses.terms import kl_penalty, masked_difference
    from agent_loop.training.registry import advantage_estimator, policy_loss, row_sampler
    from agent_loop.training.samplers import RowHistory, RowResult, SamplerContext

__all__ = [
    "Advantages",
    "Rewards",
    "RowHistory",
    "RowResult",
    "SamplerContext",
    "TokenLoss",
    "Turns",
    "advantage_estimator",
    "clipped_loss",
    "discounted_returns",
    "gae",
    "grpo_advantages",
    "has_signal",
    "kl_penalty",
    "masked_difference",
    "policy_loss",
    "rloo_advantages",
    "row_sampler",
    "share_weights",
    "step_advantages",
    "turn_advantages",
    "turn_returns",
    "whiten",
]

_MODULE_OF = {
    "Advantages": "advantages.estimators",
    "Rewards": "advantages.rewards",
    **dict.fromkeys(["Turns", "discounted_returns", "gae", "turn_returns", "whiten"], "advantages.turns"),
    **dict.fromkeys(
        [
            "grpo_advantages",
            "has_signal",
            "rloo_advantages",
            "share_weights",
            "step_advantages",
            "turn_advantages",
        ],
        "advantages.groups",
    ),
    **dict.fromkeys(["advantage_estimator", "policy_loss", "row_sampler"], "registry"),
    **dict.fromkeys(["RowHistory", "RowResult", "SamplerContext"], "samplers"),
    **dict.fromkeys(["TokenLoss", "clipped_loss"], "losses.policy"),
    **dict.fromkeys(["kl_penalty", "masked_difference"], "losses.terms"),
}


__getattr__ = lazy_exports(__name__, _MODULE_OF)


def __dir__() -> list[str]:
    return sorted(__all__)

"""The losses of policy and critic and their parts. Pure functions of tensors.

B rows, T response tokens, V tokens known.
A value at a masked token changes no result and gets a gradient of exactly 0, be it infinite or NaN.
"""

from agent_loop.training.losses.aggregation import (
    MAX_LOG_RATIO,
    Aggregation,
    aggregate,
    loss_denominator,
    masked_difference,
    masked_mean,
    rollout_lengths,
)
from agent_loop.training.losses.correction import Correction, correct
from agent_loop.training.losses.kl import kl_penalty
from agent_loop.training.losses.policy import PolicyLoss, policy_loss
from agent_loop.training.losses.tokens import entropy, token_logprobs
from agent_loop.training.losses.value import ValueLoss, value_loss

__all__ = [
    "MAX_LOG_RATIO",
    "Aggregation",
    "Correction",
    "PolicyLoss",
    "ValueLoss",
    "aggregate",
    "correct",
    "entropy",
    "kl_penalty",
    "loss_denominator",
    "masked_difference",
    "masked_mean",
    "policy_loss",
    "rollout_lengths",
    "token_logprobs",
    "value_loss",
]

"""Losses of policy and critic: pure functions of tensors. B rows, T response tokens, V tokens of the vocabulary.

A value at a masked token changes no result and gets a gradient of exactly 0, even if it is infinite or NaN.
"""

from agent_loop.training.losses import cispo, dppo, sapo
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
from agent_loop.training.losses.dppo import binary_divergence
from agent_loop.training.losses.kl import kl_penalty
from agent_loop.training.losses.policy import TokenLoss, clipped_loss, load_policy_loss, token_loss
from agent_loop.training.losses.sample_size import WEIGHT_SUMS, effective_share, weight_sums
from agent_loop.training.losses.tokens import TokenLogProbs, entropy, token_logprobs
from agent_loop.training.losses.value import ValueLoss, value_loss
from agent_loop.training.losses.vocabulary_blocks import LinearHead, LogitTransform, blockwise_logprobs

__all__ = [
    "MAX_LOG_RATIO",
    "WEIGHT_SUMS",
    "Aggregation",
    "Correction",
    "LinearHead",
    "LogitTransform",
    "TokenLogProbs",
    "TokenLoss",
    "ValueLoss",
    "aggregate",
    "binary_divergence",
    "blockwise_logprobs",
    "cispo",
    "clipped_loss",
    "correct",
    "dppo",
    "effective_share",
    "entropy",
    "kl_penalty",
    "load_policy_loss",
    "loss_denominator",
    "masked_difference",
    "masked_mean",
    "rollout_lengths",
    "sapo",
    "token_logprobs",
    "token_loss",
    "value_loss",
    "weight_sums",
]

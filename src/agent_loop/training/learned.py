"""Training results of each trajectory, for storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from torch import Tensor

from agent_loop.rollout.batch import RolloutBatch
from agent_loop.storage.columns import Learned
from agent_loop.trajectory import Trajectory

ADVANTAGES = "advantages"
"""Column that the learner adds to its batch, float32 [B, R]."""
IS_TRAINED = "is_trained"
"""Column that the learner adds to its batch, bool [B]: rows that were trained."""
TRAIN_LOG_PROBS = "train_logprobs"
"""Column that the actor adds, float32 [B, R]: its log-probs before the update, NaN in rows without."""
TOKEN_VALUES = "trained."
"""Prefix of columns that the actor adds, float32 [B, R]: a metric of each token, such as its entropy, as the mean over
the epochs of the update. The name of the metric follows. NaN in rows that were not trained."""
COLUMNS = (ADVANTAGES, IS_TRAINED, TRAIN_LOG_PROBS)


def learned_of(batch: RolloutBatch, trajectories: Sequence[Trajectory]) -> list[Learned]:
    """Return the training results of each trajectory of a batch.

    Args:
        batch: Batch that `assemble` returned and `Learner.learn` annotated.
        trajectories: Trajectories of the batch.
    """
    held = cast(Any, batch)
    advantages_BR, is_trained_B, logprobs_BR = (held.get(name, None) for name in COLUMNS)
    learned: list[Learned] = []
    for row, trajectory in enumerate(trajectories):
        num_tokens = len(trajectory.output.response_ids)
        logprobs = _row(logprobs_BR, row, num_tokens)
        is_known = logprobs is not None and not np.isnan(logprobs).any()
        is_trained = is_trained_B is not None and bool(is_trained_B[row])
        learned.append(
            Learned(
                advantages=_row(advantages_BR, row, num_tokens) if is_trained else None,
                train_logprobs=logprobs if is_known else None,
                trained_mask=np.asarray(batch["response_mask"][row, :num_tokens], dtype=bool),
            )
        )
    return learned


def _row(values_BR: Tensor | None, row: int, num_tokens: int) -> Any:
    return None if values_BR is None else np.asarray(values_BR[row, :num_tokens], dtype=np.float32)

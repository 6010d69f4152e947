"""Finds the rows of a batch that are branches of one rollout."""

from __future__ import annotations

import torch
from torch import Tensor

from agent_loop.rollout.batch import RolloutBatch


def rollouts_of_rows(batch: RolloutBatch) -> Tensor:
    """Return for each row the number of its rollout, counted from 0 in the order of their first rows; int64 [B].

    Rows without a branch number are rollouts of their own.
    """
    columns: list[list[int]] = [batch[name].tolist() for name in ("group", "rollout", "branch")]
    numbers: dict[tuple[int, int, int], int] = {}
    found: list[int] = []
    for row, (group, rollout, branch) in enumerate(zip(*columns, strict=True)):
        key = (group, rollout, row if branch < 0 else -1)
        found.append(numbers.setdefault(key, len(numbers)))
    return torch.tensor(found, dtype=torch.int64)


def per_rollout(values_B: Tensor, *, rollouts_B: Tensor) -> Tensor:
    """Return for each row the sum of the values of all rows of its rollout, [B]."""
    return torch.zeros_like(values_B).index_add_(0, rollouts_B, values_B)[rollouts_B]


def branch_weights(rollouts_B: Tensor) -> Tensor:
    """Return 1 divided by the number of rows of each row's rollout, [B] float64."""
    ones_B = torch.ones(rollouts_B.shape, dtype=torch.float64)
    return ones_B / per_rollout(ones_B, rollouts_B=rollouts_B)

"""Tokens to one number, and what is masked out of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agent_loop.config import AggregationMode

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut to this size, so that one absurd token cannot make the loss infinite."""


@dataclass(frozen=True, slots=True)
class Aggregation:
    """How the tokens of a mini-batch are weighed, whichever part of it is at hand."""

    mode: AggregationMode
    denominator: float
    """`loss_denominator` of the whole mini-batch: so the parts' results add up to the whole's."""

    def __call__(self, values_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
        return aggregate(values_BT, mask_BT=mask_BT, mode=self.mode, denominator=self.denominator)


def aggregate(
    values_BT: Tensor, *, mask_BT: Tensor, mode: AggregationMode, denominator: float | None = None
) -> Tensor:
    """Weighs tokens into one number.

    `token-mean` is DAPO's (arXiv 2503.14476), `seq-mean-token-mean` GRPO's (arXiv 2402.03300),
    `seq-mean-token-sum-norm` Dr. GRPO's (arXiv 2503.20783).

    Args:
        values_BT: Any values; those at masked tokens do not count.
        mask_BT: 1 for tokens that count.
        mode: How tokens are weighed.
        denominator: What the sum is divided by. Give `loss_denominator` of the whole mini-batch when these rows
            are only a part of it: then the parts' results add up to the whole's. None is that of these rows.
    """
    values_BT = torch.where(mask_BT.bool(), values_BT, 0.0)
    if denominator is None:
        denominator = loss_denominator(mask_BT, mode=mode)
    if mode == "seq-mean-token-mean":
        return (values_BT.sum(dim=-1) / mask_BT.sum(dim=-1).clamp(min=1)).sum() / denominator
    return values_BT.sum() / denominator


def loss_denominator(mask_BT: Tensor, *, mode: AggregationMode, length: int | None = None) -> float:
    """The number of tokens, or of rows, that a mean is taken over; at least 1.

    Args:
        mask_BT: 1 for tokens that count.
        mode: How tokens are weighed.
        length: Of `seq-mean-token-sum-norm`: what each row's sum is divided by; None is the width T.
    """
    if mode == "token-mean":
        return max(1.0, float(mask_BT.sum()))
    num_rows = max(1.0, float(mask_BT.any(dim=-1).sum()))
    return num_rows * (length or mask_BT.shape[-1]) if mode == "seq-mean-token-sum-norm" else num_rows


def masked_mean(values_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
    """The mean over all unmasked tokens; 0 if there are none."""
    return aggregate(values_BT, mask_BT=mask_BT, mode="token-mean")


def masked_difference(left_BT: Tensor, right_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
    """Left minus right, cut to `MAX_LOG_RATIO`, and 0 at masked tokens."""
    difference_BT = torch.where(mask_BT.bool(), left_BT - right_BT, 0.0)
    return difference_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

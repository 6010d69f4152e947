"""Aggregation of values of tokens to one number, and masking."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agent_loop.config import AggregationMode

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios, so that a single token cannot make the loss infinite."""


@dataclass(frozen=True, slots=True)
class Aggregation:
    """Weights of the tokens of a mini-batch, for any part of it."""

    mode: AggregationMode
    denominator: float
    """`loss_denominator` of the whole mini-batch, so that the results of its parts add up."""
    lengths_B: Tensor | None = None
    """`rollout_lengths` of the rows; None: each row is a rollout."""

    @classmethod
    def of_rows(
        cls,
        mask_BT: Tensor,
        *,
        rows: Tensor,
        rollouts_B: Tensor,
        mode: AggregationMode,
        length: int | None = None,
    ) -> Aggregation:
        """Return the aggregation of a mini-batch, with lengths for all rows of the batch.

        Args:
            mask_BT: 1 for tokens that count, in the whole batch.
            rows: Indices of the rows of the mini-batch.
            rollouts_B: Number of the rollout of each row of the whole batch.
            mode: Mode of the aggregation.
            length: See `loss_denominator`.
        """
        is_in_B1 = torch.zeros(len(mask_BT), 1, dtype=mask_BT.dtype).index_fill(0, rows, 1)
        mask_BT = mask_BT * is_in_B1
        return cls(
            mode=mode,
            denominator=loss_denominator(mask_BT, mode=mode, length=length, rollouts_B=rollouts_B),
            lengths_B=rollout_lengths(mask_BT, rollouts_B=rollouts_B),
        )

    def cut(self, rows_B: Tensor) -> Aggregation:
        """Return the aggregation for some rows of the batch."""
        if self.lengths_B is None:
            return self
        return replace(self, lengths_B=self.lengths_B[rows_B.to(self.lengths_B.device)])

    def __call__(self, values_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
        return aggregate(
            values_BT,
            mask_BT=mask_BT,
            mode=self.mode,
            denominator=self.denominator,
            lengths_B=self.lengths_B,
        )


def aggregate(
    values_BT: Tensor,
    *,
    mask_BT: Tensor,
    mode: AggregationMode,
    denominator: float | None = None,
    lengths_B: Tensor | None = None,
) -> Tensor:
    """Aggregate values of tokens to one number.

    `token-mean` is DAPO's (arXiv 2503.14476), `seq-mean-token-mean` GRPO's (arXiv 2402.03300),
    `seq-mean-token-sum-norm` Dr. GRPO's (arXiv 2503.20783). The sequence is the rollout: its trained tokens in all its
    rows. So a rollout of k equal rows weighs as much as one of one row in `seq-mean-token-mean`, and k times as much in
    the other modes, where a rollout weighs by its tokens.

    Args:
        values_BT: Values of tokens; values at masked tokens do not count.
        mask_BT: 1 for tokens that count.
        mode: Mode of the aggregation.
        denominator: Divisor of the sum. If the rows are a part of a mini-batch, give `loss_denominator` of the whole
            mini-batch, so that the results of the parts add up. None is that of these rows.
        lengths_B: `rollout_lengths` in the whole mini-batch; None: each row is a rollout.
    """
    values_BT = torch.where(mask_BT.bool(), values_BT, 0.0)
    if denominator is None:
        denominator = loss_denominator(mask_BT, mode=mode)
    if mode == "seq-mean-token-mean":
        lengths_B = mask_BT.sum(dim=-1) if lengths_B is None else lengths_B.to(values_BT.device)
        return (values_BT.sum(dim=-1) / lengths_B.clamp(min=1)).sum() / denominator
    return values_BT.sum() / denominator


def loss_denominator(
    mask_BT: Tensor, *, mode: AggregationMode, length: int | None = None, rollouts_B: Tensor | None = None
) -> float:
    """Return the number of tokens or rollouts that a mean divides by; at least 1.

    Args:
        mask_BT: 1 for tokens that count.
        mode: Mode of the aggregation.
        length: Divisor of each rollout's sum in `seq-mean-token-sum-norm`; None is the width T.
        rollouts_B: Number of the rollout of each row; None: each row is a rollout.
    """
    if mode == "token-mean":
        return max(1.0, float(mask_BT.sum()))
    has_token_B = mask_BT.any(dim=-1)
    count = max(1.0, float(has_token_B.sum()))
    if rollouts_B is not None:
        has_token_of_rollout = torch.zeros_like(rollouts_B).index_add_(0, rollouts_B, has_token_B.long())
        count = max(1.0, float(has_token_of_rollout.count_nonzero()))
    return count * (length or mask_BT.shape[-1]) if mode == "seq-mean-token-sum-norm" else count


def rollout_lengths(mask_BT: Tensor, *, rollouts_B: Tensor) -> Tensor:
    """Return the number of tokens that count in each row's rollout; int64 [B]."""
    lengths_B = mask_BT.sum(dim=-1)
    return torch.zeros_like(lengths_B).index_add_(0, rollouts_B, lengths_B)[rollouts_B]


def masked_mean(values_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
    """Return the mean over all unmasked tokens; 0 if there are none."""
    return aggregate(values_BT, mask_BT=mask_BT, mode="token-mean")


def masked_difference(left_BT: Tensor, right_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
    """Return the log-ratios `left - right`, at most `MAX_LOG_RATIO` in size, and 0 at masked tokens.

    Every log-ratio of losses, weights and metrics is computed here. A log-ratio that is cut has no gradient. A token
    whose log-prob is minus infinity on both sides has a log-ratio of 0 without a gradient. Where it is minus infinity
    on one side, the log-ratio is cut.
    """
    is_impossible_BT = left_BT.isneginf() & right_BT.isneginf()
    is_counted_BT = mask_BT.bool() & ~is_impossible_BT
    left_BT, right_BT = (torch.where(is_counted_BT, side_BT, 0.0) for side_BT in (left_BT, right_BT))
    return (left_BT - right_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

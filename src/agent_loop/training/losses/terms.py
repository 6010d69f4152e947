"""Masked sums over tokens, and the terms beside the policy loss: KL, importance weights, and the loss of the critic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from agent_loop.config import AggregationMode, CorrectionConfig, KLEstimator
from agent_loop.training.advantages.groups import per_rollout

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios, so that a single token cannot make the loss infinite."""


@dataclass(frozen=True, slots=True)
class Aggregation:
    """Mean over the tokens of a mini-batch, to which each of its parts adds."""

    divisors_B: Tensor
    """Divisor of the sum of each row; float64."""

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
        """Return the aggregation of a mini-batch, with divisors for all rows of the batch.

        `token-mean` is DAPO's (arXiv 2503.14476), `seq-mean-token-mean` GRPO's (arXiv 2402.03300),
        `seq-mean-token-sum-norm` Dr. GRPO's (arXiv 2503.20783). The sequence is the rollout: its trained tokens in all
        its rows. So a rollout of k equal rows weighs as much as one of one row in `seq-mean-token-mean`, and k times as
        much in the other modes, where a rollout weighs by its tokens.

        `mask_BT` and `rollouts_B` are those of the whole batch, `rows` the indices of the mini-batch. `length` divides
        each rollout's sum in `seq-mean-token-sum-norm`; None is the width T.
        """
        lengths_B = torch.zeros(len(mask_BT), dtype=torch.int64)
        lengths_B[rows] = mask_BT[rows].sum(dim=-1)
        num_rollouts = max(1, len(set[int](cast(Any, rollouts_B[lengths_B > 0]).tolist())))
        match mode:
            case "token-mean":
                divisors_B = lengths_B.sum().clamp(min=1).expand(len(mask_BT))
            case "seq-mean-token-mean":
                divisors_B = num_rollouts * per_rollout(lengths_B, rollouts_B=rollouts_B).clamp(min=1)
            case "seq-mean-token-sum-norm":
                divisors_B = torch.full_like(lengths_B, num_rollouts * (length or mask_BT.shape[1]))
        return cls(divisors_B.double())

    def cut(self, rows_B: Tensor) -> Aggregation:
        """Return the aggregation for some rows of the batch."""
        return Aggregation(self.divisors_B[rows_B.to(self.divisors_B.device)])

    def __call__(self, values_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
        """Return the part of the mean of these rows. Values at masked tokens do not count."""
        sums_B = torch.where(mask_BT.bool(), values_BT, 0.0).sum(dim=-1)
        return (sums_B / self.divisors_B.to(sums_B)).sum()


def masked_mean(values_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
    """Return the mean over all unmasked tokens; 0 if there are none."""
    return torch.where(mask_BT.bool(), values_BT, 0.0).sum() / mask_BT.sum().clamp(min=1)


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


def kl_penalty(
    logprobs_BT: Tensor, *, reference_logprobs_BT: Tensor, mask_BT: Tensor, estimator: KLEstimator = "k3"
) -> Tensor:
    """Return an estimate of the KL divergence of the policy from the reference per token; [B, T], 0 at masked tokens.

    With `r = reference / policy` (J. Schulman, "Approximating KL divergence", 2020): `k1 = -log r` is unbiased, and may
    be negative. `k2 = (log r)^2 / 2` is never negative and a little biased; its gradient is that of the divergence.
    `k3 = r - 1 - log r` is never negative and unbiased.
    """
    log_ratio_BT = masked_difference(reference_logprobs_BT, logprobs_BT, mask_BT=mask_BT)
    match estimator:
        case "k1":
            return -log_ratio_BT
        case "k2":
            return log_ratio_BT.square() / 2
        case "k3":
            return log_ratio_BT.exp() - 1 - log_ratio_BT


@dataclass(frozen=True, slots=True)
class Correction:
    """Importance weights of tokens, and the shares of tokens that they change."""

    weights_BT: Tensor
    """Weights, 0 at masked tokens; without gradient."""
    truncated_share: float
    """Share of tokens whose weight was cut."""
    masked_share: float
    """Share of tokens that are dropped."""


def correct(
    logprobs_BT: Tensor,
    *,
    rollout_logprobs_BT: Tensor,
    mask_BT: Tensor,
    config: CorrectionConfig,
    rollouts_B: Tensor | None = None,
) -> Correction:
    """Return bounded importance weights `exp(logprobs - rollout_logprobs)`, for `kind` `truncate` or `mask`.

    Truncated: `min(ratio, max_ratio)` (Yao et al., "Your efficient RL framework secretly brings you off-policy RL
    training", 2025). Masked: the ratio where it is between `min_ratio` and `max_ratio`, else 0 (Liu et al., "When speed
    kills stability", 2025). At level `sequence` the ratio is the product over the tokens of the rollout, in all its
    rows. At level `geometric` it is their geometric mean, as in GSPO (arXiv 2507.18071).

    `logprobs_BT` are those of the trainer, under the weights that sampled. Without `rollouts_B`, each row is a rollout.
    """
    log_ratio_BT = masked_difference(logprobs_BT.detach(), rollout_logprobs_BT, mask_BT=mask_BT)
    if config.level != "token":
        rollouts_B = torch.arange(len(mask_BT), device=mask_BT.device) if rollouts_B is None else rollouts_B
        rollout_B = per_rollout(log_ratio_BT.sum(dim=-1), rollouts_B=rollouts_B)
        if config.level == "geometric":
            rollout_B = rollout_B / per_rollout(mask_BT.sum(dim=-1), rollouts_B=rollouts_B).clamp(min=1)
        rollout_B = rollout_B.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        log_ratio_BT = rollout_B[:, None].expand_as(log_ratio_BT)
    ratio_BT, is_counted_BT = log_ratio_BT.exp(), mask_BT.bool()
    is_above_BT, is_below_BT = ratio_BT > config.max_ratio, ratio_BT < config.min_ratio
    nothing_BT = torch.zeros_like(is_counted_BT)
    is_masked_BT = is_above_BT | is_below_BT if config.kind == "mask" else nothing_BT
    is_cut_BT = is_above_BT if config.kind == "truncate" else nothing_BT
    weights_BT = torch.where(is_counted_BT & ~is_masked_BT, ratio_BT.clamp(max=config.max_ratio), 0.0)
    num_counted = max(1, int(is_counted_BT.sum()))
    return Correction(
        weights_BT=weights_BT,
        truncated_share=int((is_cut_BT & is_counted_BT).sum()) / num_counted,
        masked_share=int((is_masked_BT & is_counted_BT).sum()) / num_counted,
    )


WEIGHT_SUMS = ("weight_sum", "weight_square_sum", "weight_count")
"""Names of the sums of `weight_sums`."""


def weight_sums(weights_BT: Tensor, *, mask_BT: Tensor) -> dict[str, Tensor]:
    """Return the `WEIGHT_SUMS` of the weights of unmasked tokens. The sums of parts of a batch add up."""
    weights_BT = torch.where(mask_BT.bool(), weights_BT, 0.0)
    sums = (weights_BT.sum(), weights_BT.square().sum(), mask_BT.sum())
    return dict(zip(WEIGHT_SUMS, sums, strict=True))


def effective_share(sums: Mapping[str, float | Tensor]) -> float:
    """Return the effective sample size as a share of the sample, `(sum w)^2 / (n * sum w^2)`; 0 if all weights are 0.

    It is 1 if all weights are equal, and `1 / n` if one weight alone is not 0. Source: Kong, "A note on importance
    sampling using standardized weights", technical report 348, University of Chicago, 1992; Owen, "Monte Carlo theory,
    methods and examples", chapter 9.
    """
    total, squares, count = (float(sums[name]) for name in WEIGHT_SUMS)
    return total * total / (count * squares) if squares else 0.0


def value_loss(
    values_BT: Tensor,
    *,
    old_values_BT: Tensor,
    returns_BT: Tensor,
    mask_BT: Tensor,
    clip_range: float | None,
    reduce: Aggregation,
) -> tuple[Tensor, Tensor]:
    """Return half the squared error, or that of the clipped value if it is larger (arXiv 2005.12729, section 3).

    `max((V - R)^2, (clip(V, V_old - range, V_old + range) - R)^2) / 2`. The second result is the share of tokens whose
    gradient the clip removed.

    `clip_range` is the largest change of a value; None is no bound.
    """
    is_trained_BT = mask_BT.bool()
    values_BT, old_values_BT, returns_BT = (
        torch.where(is_trained_BT, part_BT, 0.0) for part_BT in (values_BT, old_values_BT, returns_BT)
    )
    plain_BT = (values_BT - returns_BT).square() / 2
    worse_BT, is_clipped_BT = plain_BT, torch.zeros_like(is_trained_BT)
    if clip_range is not None:
        near_BT = torch.clamp(values_BT, old_values_BT - clip_range, old_values_BT + clip_range)
        clipped_BT = (near_BT - returns_BT).square() / 2
        worse_BT, is_clipped_BT = torch.maximum(plain_BT, clipped_BT), clipped_BT > plain_BT
    clip_fraction = reduce(is_clipped_BT.to(values_BT.dtype), mask_BT=mask_BT).detach()
    return reduce(worse_BT, mask_BT=mask_BT), clip_fraction

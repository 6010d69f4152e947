"""Effective sample size of importance weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

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

    Args:
        sums: Sums that `weight_sums` returned.
    """
    total, squares, count = (float(sums[name]) for name in WEIGHT_SUMS)
    return total * total / (count * squares) if squares else 0.0

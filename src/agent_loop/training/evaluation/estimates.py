"""Means over rows with confidence intervals, and pass@k.

The rows are drawn from a population of rows, and the samples of one row are alike: so the rows are what counts as
independent, not the samples (Miller 2024, "Adding Error Bars to Evals", arXiv 2411.00640).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
NORMAL_QUANTILE = 1.959963984540054
"""Of 0.975: what a standard normal variable stays within, to both sides, with `CONFIDENCE`."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95% confidence interval."""

    value: float
    low: float | None
    """None where nothing is known of how much rows differ."""
    high: float | None

    @property
    def half_width(self) -> float | None:
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


def pass_at_k(num_samples: int, *, num_correct: int, k: int) -> float:
    """The probability that at least one of k samples is correct, estimated from more samples without bias:
    `1 - C(n - c, k) / C(n, k)` (Chen et al. 2021, arXiv 2107.03374, equation 1)."""
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(
            f"pass@{k} of {num_correct} correct out of {num_samples}; give 0 <= num_correct <= num_samples "
            "and 1 <= k <= num_samples"
        )
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def estimate_mean(values: Sequence[float]) -> Estimate:
    """The mean of one value per row, with Student's interval `mean +- t s / sqrt(R)`; none where all are the same."""
    mean = float(np.mean(values))
    if min(values) == max(values):
        return Estimate(mean, None, None)
    half = _student(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def estimate_share(values: Sequence[float], *, num_draws: float) -> Estimate:
    """The mean of one share per row, with Wilson's interval for the effective number of draws.

    A mean p of R shares with variance v (divided by R) is as certain as a share of `p (1 - p) R / v` independent draws:
    the effective sample size (Dean and Pagano 2015, "Evaluating Confidence Interval Methods for Binomial Proportions in
    Clustered Surveys"). It is at least R, since the values are shares, and bounded by `num_draws`. Where rows have one
    sample each it is R, and the interval is Wilson's own; else Student's quantile takes the place of the normal one,
    because the variance is estimated from the rows. Where all are 0 or all are 1 there is none, and the number is R.

    Args:
        values: Each from 0 to 1.
        num_draws: How many independent draws all samples together are worth at most.
    """
    num_rows, mean = len(values), float(np.mean(values))
    if num_rows == 1 or mean in (0.0, 1.0):
        return _wilson(mean, num_draws=num_rows, quantile=NORMAL_QUANTILE)
    variance = float(np.var(values))
    effective = mean * (1 - mean) * num_rows / variance if variance > 0 else num_draws
    is_clustered = num_draws > num_rows
    return _wilson(
        mean,
        num_draws=max(num_rows, min(effective, num_draws)),
        quantile=_student(num_rows - 1) if is_clustered else NORMAL_QUANTILE,
    )


def estimate_difference(values: Sequence[float], *, num_samples: float) -> Estimate:
    """The mean of one difference of shares per row, with an interval that does not vanish where all are 0.

    Two rows are added in which the sides differ by `1 / sqrt(num_samples)`, one for each side. With one sample per row
    these are the pairs that Agresti and Min add (2005, "Simple improved confidence intervals for comparing matched
    proportions"), here with Student's quantile.

    Args:
        values: Each from -1 to 1.
        num_samples: Samples per row.
    """
    num_rows = len(values) + 2
    mean = float(np.sum(values)) / num_rows
    square = (float(np.sum(np.square(values))) + 2 / num_samples) / num_rows
    half = _student(num_rows - 1) * math.sqrt((square - mean**2) / num_rows)
    return Estimate(float(np.mean(values)), max(-1.0, mean - half), min(1.0, mean + half))


def _wilson(share: float, *, num_draws: float, quantile: float) -> Estimate:
    """Wilson 1927: the shares that a test would not reject."""
    square = quantile**2
    middle = (share + square / (2 * num_draws)) / (1 + square / num_draws)
    spread = math.sqrt(share * (1 - share) / num_draws + square / (4 * num_draws**2))
    half = quantile * spread / (1 + square / num_draws)
    return Estimate(share, max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half)))


def _student(df: int) -> float:
    """The quantile of 0.975 of Student's t: exact for one degree of freedom, else Abramowitz and Stegun 26.7.5, within
    1% of it."""
    if df == 1:
        return math.tan(math.pi * CONFIDENCE / 2)
    z = NORMAL_QUANTILE
    return (
        z
        + (z**3 + z) / (4 * df)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * df**4)
    )

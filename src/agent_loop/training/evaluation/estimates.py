"""Means over rows or runs with 95% confidence intervals, and pass@k.

The rows are drawn from a population of rows, and the samples of one row are correlated. Rows therefore count as
independent, and samples do not (Miller 2024, "Adding Error Bars to Evals", arXiv 2411.00640).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NORMAL_QUANTILE = 1.959963984540054
"""A standard normal variable is within this of 0 in 95 of 100 cases."""
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(40)


@dataclass(frozen=True, slots=True)
class MeanEstimate:
    """Mean and its 95% confidence interval."""

    value: float
    low: float | None
    """None if the variance of the rows is unknown."""
    high: float | None

    @property
    def half_width(self) -> float | None:
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


def pass_at_k(num_samples: int, *, num_correct: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k samples is correct.

    The estimate is `1 - C(n - c, k) / C(n, k)` (Chen et al. 2021, arXiv 2107.03374, equation 1).
    """
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def estimate_mean(values: Sequence[float]) -> MeanEstimate:
    """Return the mean with Student's interval. There is no interval if all values are equal."""
    mean = float(np.mean(values))
    if min(values) == max(values):
        return MeanEstimate(mean, None, None)
    half = student_quantile(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return MeanEstimate(mean, mean - half, mean + half)


def estimate_welch(values: Sequence[float], *, others: Sequence[float]) -> MeanEstimate:
    """Return the mean of `values` minus that of `others`, with Welch's interval for independent samples.

    There is no interval if a side has a single value, or if neither side has a spread.
    """
    sides = (values, others)
    difference = float(np.mean(values)) - float(np.mean(others))
    if min(map(len, sides)) < 2 or all(min(side) == max(side) for side in sides):
        return MeanEstimate(difference, None, None)
    squares = [float(np.var(side, ddof=1)) / len(side) for side in sides]
    df = sum(squares) ** 2 / sum(
        square**2 / (len(side) - 1) for square, side in zip(squares, sides, strict=True)
    )
    half = student_quantile(max(1.0, df)) * math.sqrt(sum(squares))
    return MeanEstimate(difference, difference - half, difference + half)


def estimate_share(values: Sequence[float], *, num_draws: float) -> MeanEstimate:
    """Return the mean of one share per row, with Wilson's interval for the effective number of draws.

    A mean p of R shares with variance v (divided by R) is as certain as a share of `p (1 - p) R / v` independent draws
    (Dean and Pagano 2015, "Evaluating Confidence Interval Methods for Binomial Proportions in Clustered Surveys"). It
    is at least R, since the values are shares, and at most `num_draws`, the number that all samples are worth. If the
    variance is estimated from several samples per row, Student's quantile replaces the normal one.
    """
    num_rows, mean = len(values), float(np.mean(values))
    if num_rows == 1 or mean in (0.0, 1.0):
        return _wilson(mean, num_draws=num_rows, quantile=NORMAL_QUANTILE)
    variance = float(np.var(values))
    effective = mean * (1 - mean) * num_rows / variance if variance > 0 else num_draws
    return _wilson(
        mean,
        num_draws=max(num_rows, min(effective, num_draws)),
        quantile=student_quantile(num_rows - 1) if num_draws > num_rows else NORMAL_QUANTILE,
    )


def estimate_difference(values: Sequence[float], *, num_samples: float) -> MeanEstimate:
    """Return the mean of one difference of shares per row, with an interval that is not empty if all are 0.

    Two rows are added in which the sides differ by `1 / sqrt(num_samples)`, one for each side. With one sample per row
    these are the pairs that Agresti and Min add (2005, "Simple improved confidence intervals for comparing matched
    proportions"), here with Student's quantile.
    """
    num_rows = len(values) + 2
    mean = float(np.sum(values)) / num_rows
    square = (float(np.sum(np.square(values))) + 2 / num_samples) / num_rows
    half = student_quantile(num_rows - 1) * math.sqrt((square - mean**2) / num_rows)
    return MeanEstimate(float(np.mean(values)), max(-1.0, mean - half), min(1.0, mean + half))


def student_quantile(df: float) -> float:
    """Return the number within which Student's t is in 95 of 100 cases, for at least one degree of freedom.

    With `t = sqrt(df) tan(a)`, the probability of `0 < T < t` is the integral of `c cos(a)^(df - 1)`, which is computed
    by Gauss-Legendre quadrature and solved by Newton's method.
    """
    if df > 1e6:
        return NORMAL_QUANTILE
    constant = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(math.pi)
    angle, update = math.atan(NORMAL_QUANTILE / math.sqrt(df)), 1.0
    while abs(update) > 1e-12 * angle:
        powers = np.cos(angle * (_NODES + 1) / 2) ** (df - 1)
        probability = constant * angle / 2 * float(np.dot(_WEIGHTS, powers))
        update = (0.475 - probability) / (constant * math.cos(angle) ** (df - 1))
        angle += update
    return math.sqrt(df) * math.tan(angle)


def _wilson(share: float, *, num_draws: float, quantile: float) -> MeanEstimate:
    square = quantile**2
    middle = (share + square / (2 * num_draws)) / (1 + square / num_draws)
    spread = math.sqrt(share * (1 - share) / num_draws + square / (4 * num_draws**2))
    half = quantile * spread / (1 + square / num_draws)
    return MeanEstimate(share, max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half)))

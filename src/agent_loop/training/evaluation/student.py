"""Quantile of Student's t distribution."""

from __future__ import annotations

import math

import numpy as np

NORMAL_QUANTILE = 1.959963984540054
"""Quantile of 0.975 of a standard normal variable, which is within this of 0 in 95 of 100 cases."""
MAX_DF = 1e6
"""With more degrees of freedom the normal quantile is used, which is smaller by less than 3e-6."""
MAX_UPDATES = 50
TOLERANCE = 1e-12
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(40)


def student_quantile(df: float) -> float:
    """Return the quantile of 0.975 of Student's t: a variable is within this of 0 in 95 of 100 cases.

    The probability of `0 < T < t` is the integral of the density (NIST/SEMATECH e-Handbook of Statistical Methods,
    1.3.6.6.4). With `t = sqrt(df) tan(a)` it is the integral of `c cos(a)^(df - 1)`, which is computed by
    Gauss-Legendre quadrature and solved by Newton's method. The error is below 1e-5.

    Args:
        df: Degrees of freedom, at least 1. They need not be a whole number.
    """
    if df < 1:
        raise ValueError(f"{df} degrees of freedom; give at least 1")
    if df > MAX_DF:
        return NORMAL_QUANTILE
    constant = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(math.pi)
    angle = math.atan(NORMAL_QUANTILE / math.sqrt(df))
    for _ in range(MAX_UPDATES):
        angles = angle * (_NODES + 1) / 2
        probability = constant * angle / 2 * float(np.dot(_WEIGHTS, np.cos(angles) ** (df - 1)))
        update = (0.475 - probability) / (constant * math.cos(angle) ** (df - 1))
        angle += update
        if abs(update) < TOLERANCE * angle:
            break
    return math.sqrt(df) * math.tan(angle)

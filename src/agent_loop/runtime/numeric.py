"""Numbers from user code: which values count as a number, and which as a reward."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

MAX_REWARD = 1e15
"""The largest absolute value of a reward. float32, which batches use, holds its square and sums of millions of them."""
REWARD_LIMIT = "(rewards are at most 1e15 in size)"
"""Explanation for error messages."""


def as_finite_number(value: Any) -> float | None:
    """Return the value as a float; None if it is not a number, not finite, or an array of several numbers.

    Booleans count as 0 and 1. Scalars of numpy and torch are accepted.
    """
    try:
        scalar = value.item() if hasattr(value, "item") else value
        number = float(scalar) if isinstance(scalar, Real) else math.nan
    except BaseException:  # noqa: BLE001  (the value's methods are user code)
        return None
    return number if math.isfinite(number) else None


def as_reward(value: Any) -> float | None:
    """Return the value as a reward; None if it is not a finite number of at most `MAX_REWARD` in size.

    See `as_finite_number` for what counts as a number.
    """
    number = as_finite_number(value)
    return None if number is None or abs(number) > MAX_REWARD else number

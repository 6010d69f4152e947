"""Doing something soon, but not too often: what comes close together goes together."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

EVERY_S = 0.002
AT_MOST_EVERY_S = 0.05
SHARE = 0.01
"""So much longer an answer may take, that it may share a message."""
MEMORY = 1 / 16
"""The weight of the latest answer in the mean."""


class Pace:
    """Calls a function soon after it was asked to, and waits a moment between two calls.

    The first of many is called at once, so that who is alone does not wait. The moment is 2 ms, or a hundredth of what
    answers take at present, but never more than 50 ms.

    Args:
        act: What is called, from the event loop.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._mean_s = 0.0
        self._acted_at = -math.inf
        self._handle: asyncio.Handle | None = None

    def ask(self) -> None:
        """Has it called, once for all who ask until then."""
        if self._handle is not None:
            return
        loop = asyncio.get_running_loop()
        at = self._acted_at + min(max(SHARE * self._mean_s, EVERY_S), AT_MOST_EVERY_S)
        self._handle = loop.call_at(at, self._call) if at > loop.time() else loop.call_soon(self._call)

    def note(self, answered_after_s: float) -> None:
        """Takes note of how long an answer took."""
        self._mean_s += MEMORY * (answered_after_s - self._mean_s)

    def _call(self) -> None:
        self._handle = None
        self._acted_at = asyncio.get_running_loop().time()
        self._act()

"""Rate limit of a callback, so that events that come close together share one call."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

MIN_INTERVAL_S = 0.002
MAX_INTERVAL_S = 0.05
LATENCY_SHARE = 0.01
"""Interval between two calls, as a fraction of the mean latency of responses."""
LATENCY_WEIGHT = 1 / 16
"""Weight of the latest latency in the moving average."""


class Throttle:
    """Calls a function soon after a request for it, with a minimum interval between two calls.

    The first request after an idle interval is served at once. The interval is 1 % of the mean latency of responses,
    at least 2 ms and at most 50 ms.

    Args:
        act: Function to call from the event loop.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._mean_latency_s = 0.0
        self._acted_at = -math.inf
        self._handle: asyncio.Handle | None = None

    def request(self) -> None:
        """Schedule a call, unless a call is scheduled already."""
        if self._handle is not None:
            return
        loop = asyncio.get_running_loop()
        interval_s = min(max(LATENCY_SHARE * self._mean_latency_s, MIN_INTERVAL_S), MAX_INTERVAL_S)
        at = self._acted_at + interval_s
        self._handle = loop.call_at(at, self._call) if at > loop.time() else loop.call_soon(self._call)

    def record_latency(self, latency_s: float) -> None:
        """Add the latency of a response to the moving average."""
        self._mean_latency_s += LATENCY_WEIGHT * (latency_s - self._mean_latency_s)

    def _call(self) -> None:
        self._handle = None
        self._acted_at = asyncio.get_running_loop().time()
        self._act()

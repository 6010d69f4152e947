"""verl's timer."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Generator[None]:
    """Add the seconds that the body takes to `timing_raw[name]`."""
    started = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - started

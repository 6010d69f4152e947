"""What verl's code wraps around what it measures and traces."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Generator[None]:
    """Adds the seconds that the body takes to `timing_raw[name]`."""
    started = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - started


def rollout_trace_op(function: FunctionT) -> FunctionT:
    """Leaves the function as it is: what is traced here is the trajectory, not its functions."""
    return function

"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager


class StepClock:
    """Adds up seconds per phase, of the current step and of all steps."""

    def __init__(self) -> None:
        self._step_started = time.monotonic()
        self._step: defaultdict[str, float] = defaultdict(float)
        self._total: defaultdict[str, float] = defaultdict(float)

    def start_step(self) -> None:
        """Sets the current step's seconds to zero."""
        self._step_started = time.monotonic()
        self._step.clear()

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Counts the time of its body, however it ends."""
        started = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - started
            self._step[name] += seconds
            self._total[name] += seconds

    def seconds(self) -> dict[str, float]:
        """Of each phase of the current step so far, and `step`: since it started."""
        return {**self._step, "step": time.monotonic() - self._step_started}

    def shares(self) -> dict[str, float]:
        """Of each phase in the time of all phases so far, largest first."""
        seconds = dict(self._total)  # a copy: a live view reads it from a thread of its own
        total = sum(seconds.values())
        largest_first = sorted(seconds, key=lambda name: -seconds[name])
        return {name: seconds[name] / total for name in largest_first} if total else {}

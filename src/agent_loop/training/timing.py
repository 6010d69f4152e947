"""Seconds of the phases of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager


class StepClock:
    """Clock that adds up the seconds of each phase, for the current step and for all steps."""

    def __init__(self) -> None:
        self._step_started = time.monotonic()
        self._step: defaultdict[str, float] = defaultdict(float)
        self._total: defaultdict[str, float] = defaultdict(float)

    def start_step(self) -> None:
        """Reset the seconds of the current step."""
        self._step_started = time.monotonic()
        self._step.clear()

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Count the time of the body, even if it raises."""
        started = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - started
            self._step[name] += seconds
            self._total[name] += seconds

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase of the current step, and those since its start as `step`."""
        return {**self._step, "step": time.monotonic() - self._step_started}

    def shares(self) -> dict[str, float]:
        """Return the share of each phase in the time of all phases, largest first."""
        seconds = dict(self._total)  # a copy: a live view reads it from a thread of its own
        total = sum(seconds.values())
        largest_first = sorted(seconds, key=lambda name: -seconds[name])
        return {name: seconds[name] / total for name in largest_first} if total else {}

"""Where the time of a step goes: seconds of its phases, and shares of its trajectories that sum to 1."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from agent_loop.storage.times import Times, times_of
from agent_loop.training import metrics as names
from agent_loop.trajectory import Trace, Trajectory


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


PHASES: Mapping[str, str] = {
    "update": names.TIME_TRAINING,
    "publish": names.TIME_WEIGHTS,
    "validate": names.TIME_VALIDATION,
}
"""Metric of each phase of the clock, except the rollout."""
ROLLOUT = "rollout"
LEAST_SHOWN = 0.005
"""Smallest share that is printed."""


@dataclass(frozen=True, slots=True)
class Slowest:
    """Trajectory that took longest."""

    name: str
    seconds: float
    times: Times

    def __str__(self) -> str:
        """Return one line with the part that took most of the time."""
        seconds = {name.removesuffix("_s"): value for name, value in self.times.whole().items()}
        most = max(seconds, key=lambda name: seconds[name])
        return f"{self.name} {self.seconds:.1f} s ({most} {seconds[most]:.1f} s)"


@dataclass(frozen=True, slots=True)
class TimeShares:
    """Shares of the time of one or several steps."""

    seconds: float
    shares: Mapping[str, float]
    """Shares by metric, which sum to 1."""
    slowest: Slowest | None = None
    """None if no trajectory was traced."""

    def metrics(self) -> dict[str, float]:
        """Return all values by metric name."""
        slowest = {} if self.slowest is None else {names.SLOWEST_SECONDS: self.slowest.seconds}
        return {**self.shares, **slowest}

    def __str__(self) -> str:
        """Return one line, largest share first."""
        largest_first = sorted(self.shares.items(), key=lambda item: -item[1])
        parts = [
            f"{name.removeprefix(names.TIME)} {share:.0%}"
            for name, share in largest_first
            if share >= LEAST_SHOWN
        ]
        if self.slowest is not None:
            parts.append(f"slowest {self.slowest}")
        return "time: " + "  ".join(parts)

    def plus(self, other: TimeShares) -> TimeShares:
        """Return the shares of both together."""
        seconds = self.seconds + other.seconds
        shares: Mapping[str, float] = {
            name: (self.shares[name] * self.seconds + other.shares[name] * other.seconds) / (seconds or 1.0)
            for name in self.shares
        }
        slowest = max(filter(None, [self.slowest, other.slowest]), key=lambda s: s.seconds, default=None)
        return TimeShares(seconds, shares, slowest)


def time_shares(trajectories: Sequence[Trajectory], *, phases: Mapping[str, float], label: str) -> TimeShares:
    """Return the shares of the time of a step."""
    step_s = max(phases["step"], sum(value for name, value in phases.items() if name != "step"), 1e-9)
    traces = _traces(trajectories)
    shares: dict[str, float] = dict.fromkeys(_ALL, 0.0)
    for phase, name in PHASES.items():
        shares[name] = phases.get(phase, 0.0) / step_s
    rollout_share = phases.get(ROLLOUT, 0.0) / step_s
    for name, part in _rollout_shares(list(traces.values())).items():
        shares[name] += part * rollout_share
    shares[names.TIME_IDLE] += max(0.0, 1.0 - sum(shares.values()))
    slowest = max(traces, key=lambda name: traces[name].seconds, default=None)
    if slowest is None:
        return TimeShares(step_s, shares)
    trace = traces[slowest]
    return TimeShares(step_s, shares, Slowest(f"{label}/{slowest}", trace.seconds, times_of(trace)))


def _traces(trajectories: Sequence[Trajectory]) -> dict[str, Trace]:
    """Return the traces by row. The branches of a row share one trace."""
    return {f"group={t.group}/rollout={t.rollout}": t.trace for t in trajectories if t.trace is not None}


def _rollout_shares(traces: Sequence[Trace]) -> dict[str, float]:
    """Return shares that sum to 1. Without traces, everything is `time/other`."""
    seconds = sum(trace.seconds for trace in traces)
    if not seconds:
        return {names.TIME_OTHER: 1.0}
    span_s = max(t.began_at + t.seconds for t in traces) - min(t.began_at for t in traces)
    total = max(span_s * len(traces), seconds)
    parts: defaultdict[str, float] = defaultdict(float)
    for trace in traces:
        for name, value in _parts(times_of(trace)).items():
            parts[name] += value
    busy = sum(parts.values())
    return {name: value / total for name, value in parts.items()} | {names.TIME_IDLE: 1 - busy / total}


def _parts(times: Times) -> dict[str, float]:
    prefill_s = times.prefill_s or 0.0
    return {
        names.TIME_QUEUE: times.admission_s + times.queue_s,
        names.TIME_PREFILL: prefill_s,
        names.TIME_DECODE: times.generate_s - prefill_s,
        names.TIME_TOOLS: times.tool_s + times.interaction_s,
        names.TIME_REWARD: times.reward_s,
        names.TIME_OTHER: times.encode_s + times.other_s,
    }


_ALL: Sequence[str] = (
    names.TIME_QUEUE,
    names.TIME_PREFILL,
    names.TIME_DECODE,
    names.TIME_TOOLS,
    names.TIME_REWARD,
    names.TIME_OTHER,
    names.TIME_TRAINING,
    names.TIME_WEIGHTS,
    names.TIME_VALIDATION,
    names.TIME_IDLE,
)

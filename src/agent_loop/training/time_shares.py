"""Where the time of a step went: shares that sum to 1.

The phases of the trainer (update, publish, validate) have the share that the clock measured. The phase in which it
waited for the rollout is dealt out as the time of all its trajectories went: each has as many seconds as passed from
the first one's beginning to the last one's end, and those that it spent in nothing are idle. In `async` mode that wait
is shorter than the rollout, and is dealt out in the same proportions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent_loop.storage.times import Times, times_of
from agent_loop.training import metrics as names
from agent_loop.trajectory import Trace, Trajectory

PHASES: Mapping[str, str] = {
    "update": names.TIME_TRAINING,
    "publish": names.TIME_WEIGHTS,
    "validate": names.TIME_VALIDATION,
}
"""The share of each phase of the clock, but that of the rollout, which is dealt out."""
ROLLOUT = "rollout"
LEAST_SHOWN = 0.005
"""Smaller shares are not worth a word."""


@dataclass(frozen=True, slots=True)
class Slowest:
    """The trajectory that took longest."""

    name: str
    seconds: float
    times: Times

    def __str__(self) -> str:
        """With what it spent most of its time on."""
        seconds = {name.removesuffix("_s"): value for name, value in self.times.whole().items()}
        most = max(seconds, key=lambda name: seconds[name])
        return f"{self.name} {self.seconds:.1f} s ({most} {seconds[most]:.1f} s)"


@dataclass(frozen=True, slots=True)
class TimeShares:
    """What the time of one step, or of several, went to."""

    seconds: float
    shares: Mapping[str, float]
    """By metric; they sum to 1."""
    slowest: Slowest | None = None
    """None where nothing was watched."""

    def metrics(self) -> dict[str, float]:
        """All of it, by name."""
        slowest = {} if self.slowest is None else {names.SLOWEST_SECONDS: self.slowest.seconds}
        return {**self.shares, **slowest}

    def __str__(self) -> str:
        """One line, the largest share first."""
        largest_first = sorted(self.shares.items(), key=lambda item: -item[1])
        parts = [
            f"{name.removeprefix(names.TIME)} {share:.0%}"
            for name, share in largest_first
            if share >= LEAST_SHOWN
        ]
        if self.slowest is not None:
            parts.append(f"slowest {self.slowest}")
        return "time: " + "  ".join(parts)

    def and_then(self, other: TimeShares) -> TimeShares:
        """Of both together."""
        seconds = self.seconds + other.seconds
        shares: Mapping[str, float] = {
            name: (self.shares[name] * self.seconds + other.shares[name] * other.seconds) / (seconds or 1.0)
            for name in self.shares
        }
        slowest = max(filter(None, [self.slowest, other.slowest]), key=lambda s: s.seconds, default=None)
        return TimeShares(seconds, shares, slowest)


def time_shares(trajectories: Sequence[Trajectory], *, phases: Mapping[str, float], label: str) -> TimeShares:
    """What the time of a step went to.

    Args:
        trajectories: Of its rollout.
        phases: Seconds of each of the clock's phases, and of the whole `step`.
        label: Goes before the name of the slowest, as in the log.
    """
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
    """By row; its branches share one."""
    return {f"group={t.group}/rollout={t.rollout}": t.trace for t in trajectories if t.trace is not None}


def _rollout_shares(traces: Sequence[Trace]) -> dict[str, float]:
    """They sum to 1; without traces, nobody knows."""
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

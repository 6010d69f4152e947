"""Where the time of a step goes: seconds of its phases, and shares of its trajectories that sum to 1.

The phases of the trainer (update, publish, validate) have the share that the clock measured. The time in which the
trainer waited for the rollout is divided in proportion to the time of all trajectories. Each trajectory counts from
the start of the first one to the end of the last one; the time in which it was not running is idle. In `async` mode
the wait is shorter than the rollout, and is divided in the same proportions.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

from agent_loop.storage.times import times_of
from agent_loop.training import metrics as names
from agent_loop.trajectory import Trace, Trajectory

PHASES: Mapping[str, str] = {
    "update": names.TIME_TRAINING,
    "publish": names.TIME_WEIGHTS,
    "validate": names.TIME_VALIDATION,
}
"""Metric of each phase of the clock, except the rollout."""
PARTS: Mapping[str, str] = {
    "admission_s": names.TIME_QUEUE,
    "queue_s": names.TIME_QUEUE,
    "generate_s": names.TIME_DECODE,
    "tool_s": names.TIME_TOOLS,
    "interaction_s": names.TIME_TOOLS,
    "reward_s": names.TIME_REWARD,
    "encode_s": names.TIME_OTHER,
    "other_s": names.TIME_OTHER,
}
"""Metric of each part of the time of a trajectory."""
LEAST_SHOWN = 0.005
"""Smallest share that is printed."""


class StepClock:
    """Clock that adds up the seconds of each phase of the current step."""

    def __init__(self) -> None:
        self._step_started = time.monotonic()
        self._step: defaultdict[str, float] = defaultdict(float)

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
            self._step[name] += time.monotonic() - started

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase of the current step, and those since its start as `step`."""
        return {**self._step, "step": time.monotonic() - self._step_started}

    def metrics(self) -> dict[str, float]:
        """Return the seconds by metric name."""
        return {f"{names.SECONDS}{phase}": seconds for phase, seconds in self.seconds().items()}


def time_shares(
    trajectories: Sequence[Trajectory], *, phases: Mapping[str, float], label: str
) -> tuple[dict[str, float], str]:
    """Return metrics of the time of a step, and a line of text with the largest shares first.

    The metrics are shares that sum to 1, and the seconds of the slowest trajectory if one was traced. `label` is the
    prefix of the name of that trajectory.
    """
    step_s = max(phases["step"], sum(value for name, value in phases.items() if name != "step"), 1e-9)
    shares = dict.fromkeys([*PARTS.values(), names.TIME_PREFILL, *PHASES.values(), names.TIME_IDLE], 0.0)
    for phase, name in PHASES.items():
        shares[name] = phases.get(phase, 0.0) / step_s
    # The branches of a row share one trace.
    traces = {f"group={t.group}/rollout={t.rollout}": t.trace for t in trajectories if t.trace is not None}
    for name, part in _rollout_shares(list(traces.values())).items():
        shares[name] += part * phases.get("rollout", 0.0) / step_s
    shares[names.TIME_IDLE] += max(0.0, 1.0 - sum(shares.values()))
    parts = [
        f"{name.removeprefix(names.TIME)} {share:.0%}"
        for name, share in sorted(shares.items(), key=lambda item: -item[1])
        if share >= LEAST_SHOWN
    ]
    if traces:
        slowest, trace = max(traces.items(), key=lambda item: item[1].seconds)
        part, part_s = max(times_of(trace).whole().items(), key=lambda item: item[1])
        shares[names.SLOWEST_SECONDS] = trace.seconds
        parts.append(
            f"slowest {label}/{slowest} {trace.seconds:.1f} s ({part.removesuffix('_s')} {part_s:.1f} s)"
        )
    return shares, "time: " + "  ".join(parts)


def _rollout_shares(traces: Sequence[Trace]) -> dict[str, float]:
    """Return shares that sum to 1. Without traces, everything is `time/other`."""
    seconds = sum(trace.seconds for trace in traces)
    if not seconds:
        return {names.TIME_OTHER: 1.0}
    span_s = max(t.began_at + t.seconds for t in traces) - min(t.began_at for t in traces)
    total = max(span_s * len(traces), seconds)
    parts: defaultdict[str, float] = defaultdict(float)
    for times in map(times_of, traces):
        for name, value in times.whole().items():
            parts[PARTS[name]] += value / total
        parts[names.TIME_PREFILL] += (times.prefill_s or 0.0) / total
        parts[names.TIME_DECODE] -= (times.prefill_s or 0.0) / total
    return {**parts, names.TIME_IDLE: 1 - sum(parts.values())}

"""Seconds that a trajectory spent on each activity."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from agent_loop.runtime.activity import WaitKind
from agent_loop.trajectory import Span, Trace

PREFILL = "prefill_s"
"""Key in the details of a `generate` span: seconds from its start to the first token; None if unknown."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one trajectory; all but `prefill_s`, which is a part of `generate_s`, sum to its trace's seconds."""

    admission_s: float
    queue_s: float
    generate_s: float
    prefill_s: float | None
    """None if no server reports the time of its first token."""
    tool_s: float
    interaction_s: float
    reward_s: float
    encode_s: float
    other_s: float

    def whole(self) -> dict[str, float]:
        """Return the seconds by name, without `prefill_s`, which is a part of `generate_s`. They sum to the trace."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        del values["prefill_s"]
        return values


def times_of(trace: Trace) -> Times:
    """Return the seconds of a trace by activity. If several spans overlap, the one that began last counts."""
    seconds = _seconds_by_kind(trace.spans)
    named = {f"{kind}_s": seconds.pop(kind, 0.0) for kind in WaitKind if f"{kind}_s" in _NAMES}
    prefills = [s.details[PREFILL] for s in trace.spans if s.details.get(PREFILL) is not None]
    return Times(
        **named,
        prefill_s=min(sum(prefills), named["generate_s"]) if prefills else None,
        other_s=max(0.0, trace.seconds - sum(named.values())),
    )


def _seconds_by_kind(spans: Sequence[Span]) -> dict[str, float]:
    """Return the seconds of each kind. Sweeps once over the times at which a span starts or ends."""
    begins = sorted(spans, key=lambda span: span.start)
    moments = sorted({moment for span in spans for moment in (span.start, span.end)})
    seconds: defaultdict[str, float] = defaultdict(float)
    opened: list[Span] = []
    num_begun = 0
    for moment, following in pairwise(moments):
        while num_begun < len(begins) and begins[num_begun].start <= moment:
            opened.append(begins[num_begun])
            num_begun += 1
        while opened and opened[-1].end <= moment:
            opened.pop()
        if opened:
            seconds[opened[-1].kind] += following - moment
    return dict(seconds)


_NAMES = frozenset(field.name for field in fields(Times))

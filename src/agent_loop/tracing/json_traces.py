"""Accounts as JSON documents.

Every trajectory of a rollout is converted, so the conversion is kept cheap: lists instead of objects, and no values
that a reader can compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise, repeat
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np

from agent_loop.tracing.account import Account, TokenRun
from agent_loop.tracing.bounded import bounded
from agent_loop.tracing.events import TraceAttributes
from agent_loop.tracing.turn_spans import spans_of_branch
from agent_loop.tracing.turn_texts import messages_to_trace
from agent_loop.trajectory import Feedback, Incident, IncidentKind, Segment, Span, Trace, Trajectory
from agent_loop.types import IntArray, Origin, StopReason

VERSION = 1

JsonTrace: TypeAlias = Mapping[str, Any]
TokenDecoder: TypeAlias = Callable[[Sequence[IntArray]], Sequence[str]]
"""Function that decodes several runs of tokens at once."""


@dataclass(frozen=True, slots=True)
class FinishedTrajectory:
    """Finished trajectory that is queued for the writers."""

    trajectory: Trajectory
    attributes: TraceAttributes
    trace: Trace


def to_json_traces(
    items: Sequence[FinishedTrajectory], *, decode_runs: TokenDecoder | None
) -> Iterator[JsonTrace]:
    """Yield the JSON document of each trajectory.

    Documents are built one at a time, so that few objects are alive at once and Python's gc rarely runs.

    Args:
        items: Finished trajectories.
        decode_runs: Decodes token ids into texts. None keeps the ids and leaves out the texts of tools.
    """
    runs_of_items = [_runs_of(item.trajectory.output.segments) for item in items]
    texts: Iterator[str | None] = repeat(None)
    if decode_runs is not None:
        texts = iter(decode_runs([run.token_ids for runs in runs_of_items for run in runs]))
    for item, runs in zip(items, runs_of_items, strict=True):
        yield _to_json_trace(item, runs, texts, has_texts=decode_runs is not None)


def account_from_json(form: JsonTrace) -> Account:
    """Return the account that a JSON document describes.

    Raises:
        KeyError, TypeError, ValueError: `form` is not such a document.
    """
    return Account(
        attributes=TraceAttributes(**form["attributes"]),
        **{name: form[name] for name in _COPIED_FIELDS},
        stop_reason=StopReason(form["stop_reason"]),
        runs=[_run_of(*run) for run in form["runs"]],
        feedback=[_feedback_of(*each) for each in form["feedback"]],
        incidents=[Incident(IncidentKind(kind), detail, turn) for kind, detail, turn in form["incidents"]],
        spans=[Span(*span) for span in form["spans"]],
    )


_COPIED_FIELDS = (
    "began_at",
    "seconds",
    "failure",
    "reward",
    "reward_extra",
    "num_turns",
    "is_branch",
    "messages",
)


def _to_json_trace(
    item: FinishedTrajectory, runs: Sequence[Segment], texts: Iterator[str | None], *, has_texts: bool
) -> JsonTrace:
    trajectory, attributes, trace = item.trajectory, item.attributes, item.trace
    output, is_branch = trajectory.output, trajectory.branch is not None
    spans = _branch_spans(trace.spans, runs) if is_branch else trace.spans
    return {
        "version": VERSION,
        "attributes": {name: getattr(attributes, name) for name in TraceAttributes.__slots__},
        "began_at": trace.began_at,
        "seconds": trace.seconds,
        "stop_reason": output.stop_reason,
        "failure": None if output.failure is None else output.failure.error,
        "reward": trajectory.reward,
        "reward_extra": bounded(trajectory.reward_extra),
        "num_turns": output.num_turns,
        "is_branch": is_branch,
        "runs": [
            (run.origin, len(run), run.weight_version, run.token_ids if text is None else text)
            for run, text in zip(runs, texts, strict=False)
        ],
        "messages": messages_to_trace(trajectory) if has_texts else (),
        "feedback": [(f.origin, f.name, f.place, f.reward, f.incident) for f in output.feedback],
        "incidents": [(i.kind, i.detail, i.assistant_turn) for i in output.incidents],
        "spans": [(s.kind, s.name, s.start, s.end, s.details) for s in spans],
    }


def _runs_of(segments: Sequence[Segment]) -> Sequence[Segment]:
    """Merge consecutive segments of one origin. A merged segment has the weight version of its last part."""
    if all(one.origin is not other.origin for one, other in pairwise(segments)):
        return segments
    runs: list[Segment] = []
    for origin, group in groupby(segments, key=attrgetter("origin")):
        parts = list(group)
        token_ids = np.concatenate([part.token_ids for part in parts])
        runs.append(Segment(token_ids, origin, weight_version=parts[-1].weight_version))
    return runs


def _branch_spans(spans: Sequence[Span], runs: Sequence[Segment]) -> list[Span]:
    bounds = pairwise(accumulate(map(len, runs), initial=0))
    return spans_of_branch(
        spans,
        turns=[bound for run, bound in zip(runs, bounds, strict=True) if run.origin is Origin.MODEL],
        num_prompt_tokens=sum(len(run) for run in runs if run.origin is Origin.PROMPT),
    )


def _run_of(origin: str, num_tokens: int, weight_version: int | None, tokens: Any) -> TokenRun:
    ids, text = (None, tokens) if isinstance(tokens, str) else (tokens, None)
    return TokenRun(Origin(origin), num_tokens, weight_version, ids, text)


def _feedback_of(
    origin: str, name: str, place: int | None, reward: float | None, incident: str | None
) -> Feedback:
    return Feedback(Origin(origin), name, place, reward, None if incident is None else IncidentKind(incident))

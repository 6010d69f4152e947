"""Accounts as JSON holds them. All of a rollout's trajectories become forms, so that is made to take little time: lists
in the place of objects, and nothing worked out that a reader can."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise, repeat
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np

from agent_loop.tracing.account import Account, Run
from agent_loop.tracing.bounded import bounded
from agent_loop.tracing.events import TraceAttributes
from agent_loop.tracing.turn_spans import spans_of_branch
from agent_loop.tracing.words import said_messages
from agent_loop.trajectory import Feedback, Incident, IncidentKind, Segment, Span, Trace, Trajectory
from agent_loop.types import IntArray, Origin, StopReason

VERSION = 1

Form: TypeAlias = Mapping[str, Any]
TextsOf: TypeAlias = Callable[[Sequence[IntArray]], Sequence[str]]
"""The texts of several runs of tokens."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A trajectory that ended, on its way to the writers."""

    trajectory: Trajectory
    attributes: TraceAttributes
    trace: Trace


def forms_of(items: Sequence[Finished], *, texts_of: TextsOf | None) -> Iterator[Form]:
    """The form of each, one at a time: so few objects live at once that Python's garbage collection stays quiet.

    Args:
        texts_of: Gives texts in the place of token ids; None leaves the ids, and the words of tools out.
    """
    runs_of_items = [_runs_of(item.trajectory.output.segments) for item in items]
    texts: Iterator[str | None] = repeat(None)
    if texts_of is not None:
        texts = iter(texts_of([run.token_ids for runs in runs_of_items for run in runs]))
    for item, runs in zip(items, runs_of_items, strict=True):
        yield _form_of(item, runs, texts, has_texts=texts_of is not None)


def account_of(form: Form) -> Account:
    """What a form says; it may have been JSON in between.

    Raises:
        KeyError, TypeError, ValueError: It is no form.
    """
    return Account(
        attributes=TraceAttributes(**form["attributes"]),
        **{name: form[name] for name in _AS_THEY_ARE},
        stop_reason=StopReason(form["stop_reason"]),
        runs=[_run_of(*run) for run in form["runs"]],
        feedback=[_feedback_of(*each) for each in form["feedback"]],
        incidents=[Incident(IncidentKind(kind), detail, turn) for kind, detail, turn in form["incidents"]],
        spans=[Span(*span) for span in form["spans"]],
    )


_AS_THEY_ARE = (
    "began_at",
    "seconds",
    "failure",
    "reward",
    "reward_extra",
    "num_turns",
    "is_branch",
    "messages",
)


def _form_of(
    item: Finished, runs: Sequence[Segment], texts: Iterator[str | None], *, has_texts: bool
) -> Form:
    trajectory, attributes, trace = item.trajectory, item.attributes, item.trace
    output, is_branch = trajectory.output, trajectory.branch is not None
    spans = _spans_of_branch(trace.spans, runs) if is_branch else trace.spans
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
        "messages": said_messages(trajectory) if has_texts else (),
        "feedback": [(f.origin, f.name, f.place, f.reward, f.incident) for f in output.feedback],
        "incidents": [(i.kind, i.detail, i.assistant_turn) for i in output.incidents],
        "spans": [(s.kind, s.name, s.start, s.end, s.details) for s in spans],
    }


def _runs_of(segments: Sequence[Segment]) -> Sequence[Segment]:
    """Segments that follow each other and have one origin, as one; of the last one's version."""
    if all(one.origin is not other.origin for one, other in pairwise(segments)):
        return segments
    runs: list[Segment] = []
    for origin, group in groupby(segments, key=attrgetter("origin")):
        parts = list(group)
        token_ids = np.concatenate([part.token_ids for part in parts])
        runs.append(Segment(token_ids, origin, weight_version=parts[-1].weight_version))
    return runs


def _spans_of_branch(spans: Sequence[Span], runs: Sequence[Segment]) -> list[Span]:
    places = pairwise(accumulate(map(len, runs), initial=0))
    return spans_of_branch(
        spans,
        turns=[place for run, place in zip(runs, places, strict=True) if run.origin is Origin.MODEL],
        num_prompt_tokens=sum(len(run) for run in runs if run.origin is Origin.PROMPT),
    )


def _run_of(origin: str, num_tokens: int, weight_version: int | None, tokens: Any) -> Run:
    ids, text = (None, tokens) if isinstance(tokens, str) else (tokens, None)
    return Run(Origin(origin), num_tokens, weight_version, ids, text)


def _feedback_of(
    origin: str, name: str, place: int | None, reward: float | None, incident: str | None
) -> Feedback:
    return Feedback(Origin(origin), name, place, reward, None if incident is None else IncidentKind(incident))

"""Conversion of events to a tree of nested spans, which tracing systems expect."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from agent_loop.runtime.activity import WaitKind
from agent_loop.tracing.events import (
    BeginEvent,
    EndEvent,
    EventTime,
    GenerationEvent,
    IncidentEvent,
    InteractionEvent,
    ObservationEvent,
    PromptEvent,
    RewardEvent,
    SpanEvent,
    ToolCallEvent,
    TraceAttributes,
)
from agent_loop.tracing.json_traces import JsonTrace, account_from_json
from agent_loop.tracing.reading import events_of
from agent_loop.types import TokenIds

SHORTEST_WAIT_S = 0.001

TimedEvent: TypeAlias = GenerationEvent | ToolCallEvent | InteractionEvent | SpanEvent


@dataclass(frozen=True, slots=True)
class SpanNode:
    """Span below the trajectory's root span."""

    event: TimedEvent
    name: str
    parent: int | None
    """Index of the enclosing node, which comes earlier in the list; None for the root span."""
    start_ns: int
    """Nanoseconds since 1970."""
    end_ns: int
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SpanTree:
    """Spans of a trajectory."""

    attributes: TraceAttributes
    start_ns: int
    end_ns: int
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    ended: EndEvent
    reward: float | None
    incidents: Sequence[IncidentEvent]
    nodes: Sequence[SpanNode]
    """Parents before children, otherwise sorted by start."""

    @property
    def values(self) -> dict[str, Any]:
        """Scalar values that describe the trajectory."""
        ended = self.ended
        return {
            "stop_reason": str(ended.stop_reason),
            "reward": self.reward,
            "num_turns": ended.num_turns,
            "num_prompt_tokens": ended.num_prompt_tokens,
            "num_response_tokens": ended.num_response_tokens,
            "num_model_tokens": ended.num_model_tokens,
            "num_incidents": len(self.incidents),
        }


@dataclass(slots=True)
class _LatestTexts:
    """Latest texts or token ids that the model received and sampled."""

    prompt: dict[str, Any] = field(default_factory=dict[str, Any])
    added: dict[str, Any] = field(default_factory=dict[str, Any])
    answer: dict[str, Any] = field(default_factory=dict[str, Any])


def build_span_tree(form: JsonTrace) -> SpanTree:
    """Return the spans of a trajectory. The input of a completion's span is what is new in its context."""
    events, latest = events_of(account_from_json(form)), _LatestTexts()
    timed: list[tuple[TimedEvent, dict[str, Any]]] = []
    began, ended = events[0], events[-1]
    assert isinstance(began, BeginEvent)
    assert isinstance(ended, EndEvent)
    reward: float | None = None
    incidents: list[IncidentEvent] = []
    for event in events:
        if isinstance(event, PromptEvent):
            latest.prompt = latest.added = _text_or_ids(event.tokens.text, event.tokens.ids)
        elif isinstance(event, ObservationEvent):
            latest.added = _text_or_ids(event.tokens.text, event.tokens.ids)
        elif isinstance(event, GenerationEvent):
            timed.append((event, latest.added))
            latest.answer = _text_or_ids(event.tokens.text, event.tokens.ids) or latest.answer
        elif isinstance(event, ToolCallEvent | InteractionEvent | SpanEvent):
            timed.append((event, {}))
        elif isinstance(event, IncidentEvent):
            incidents.append(event)
        elif isinstance(event, RewardEvent):
            reward = event.reward
    start_ns = int(began.began_at * 1e9)
    return SpanTree(
        attributes=began.attributes,
        start_ns=start_ns,
        end_ns=start_ns + int(ended.seconds * 1e9),
        inputs=latest.prompt,
        outputs=latest.answer,
        ended=ended,
        reward=reward,
        incidents=incidents,
        nodes=_nodes(timed, start_ns=start_ns),
    )


def _nodes(timed: Sequence[tuple[TimedEvent, dict[str, Any]]], *, start_ns: int) -> list[SpanNode]:
    """Return one node per event that has a time."""
    watched = [
        (event, event.time, inputs)
        for event, inputs in timed
        if event.time is not None and not _is_negligible(event, event.time)
    ]
    watched.sort(key=lambda entry: (entry[1].start, -entry[1].end, entry[1].span or math.inf))
    nodes: list[SpanNode] = []
    node_index: dict[int, int] = {}
    for event, time, inputs in watched:
        if time.span is not None:
            node_index[time.span] = len(nodes)
        nodes.append(
            _node(
                event,
                time,
                inputs,
                parent=None if time.within is None else node_index.get(time.within),
                start_ns=start_ns,
            )
        )
    return nodes


def _is_negligible(event: TimedEvent, time: EventTime) -> bool:
    """Return whether an event is a wait below `SHORTEST_WAIT_S`."""
    return (
        isinstance(event, SpanEvent)
        and event.kind != WaitKind.USER
        and time.end - time.start < SHORTEST_WAIT_S
    )


def _node(
    event: TimedEvent, time: EventTime, inputs: dict[str, Any], *, parent: int | None, start_ns: int
) -> SpanNode:
    outputs: dict[str, Any] = {}
    error: str | None = None
    match event:
        case GenerationEvent():
            name, outputs = "generate", _text_or_ids(event.tokens.text, event.tokens.ids)
        case ToolCallEvent():
            name = event.name
            inputs = {} if event.arguments is None else {"arguments": event.arguments}
            outputs = _text_or_ids(event.reply, None)
            error = None if event.incident is None else str(event.incident)
        case InteractionEvent():
            name, outputs = "interaction", _text_or_ids(event.reply, None)
        case SpanEvent():
            name, details = event.name or event.kind, event.details
            inputs = details.get("inputs") or {}
            outputs = {} if details.get("output") is None else {"output": details["output"]}
            error = details.get("error")
    return SpanNode(
        event=event,
        name=name,
        parent=parent,
        start_ns=start_ns + int(time.start * 1e9),
        end_ns=start_ns + int(time.end * 1e9),
        inputs=inputs,
        outputs=outputs,
        error=error,
    )


def _text_or_ids(text: str | None, ids: TokenIds | None) -> dict[str, Any]:
    if text is not None:
        return {"text": text}
    return {} if ids is None else {"token_ids": ids}


def node_attributes(node: SpanNode) -> dict[str, Any]:
    """Return the scalar values that describe a span, without unknown ones."""
    event = node.event
    values: dict[str, Any] = {}
    match event:
        case GenerationEvent():
            values = {
                "turn": event.turn,
                "server": event.server,
                "num_context_tokens": event.tokens.place,
                "num_tokens": event.tokens.count,
                "num_cached_tokens": event.num_cached_tokens,
                "num_preempted": event.num_preempted,
                "prefill_s": event.prefill_s,
                "weight_version": event.weight_version,
            }
        case ToolCallEvent():
            values = {"turn": event.turn, "number": event.number, "reward": event.reward}
        case InteractionEvent():
            values = {"turn": event.turn, "reward": event.reward}
        case SpanEvent():
            values = {"kind": event.kind, **(event.details.get("attributes") or {})}
    return {key: value for key, value in values.items() if value is not None}

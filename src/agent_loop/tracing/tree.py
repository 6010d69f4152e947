"""Events as spans that lie within each other: the form in which tracing systems want them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from agent_loop.runtime.activity import WaitKind
from agent_loop.tracing.events import (
    Began,
    CalledTool,
    Ended,
    Generated,
    Interacted,
    Lost,
    Observed,
    Prompted,
    Rewarded,
    Time,
    TraceAttributes,
    Waited,
)
from agent_loop.tracing.forms import Form, account_of
from agent_loop.tracing.reading import events_of
from agent_loop.types import TokenIds

SHORTEST_WAIT_S = 0.001

TimedEvent: TypeAlias = Generated | CalledTool | Interacted | Waited


@dataclass(frozen=True, slots=True)
class SpanNode:
    """A span below the trajectory's."""

    event: TimedEvent
    name: str
    parent: int | None
    """Place of the node in which it lies; it comes before. None is the trajectory's own span."""
    start_ns: int
    """Since 1970."""
    end_ns: int
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Tree:
    """A trajectory as spans."""

    attributes: TraceAttributes
    start_ns: int
    end_ns: int
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    ended: Ended
    reward: float | None
    incidents: Sequence[Lost]
    nodes: Sequence[SpanNode]
    """Parents before children, else by their start."""

    @property
    def values(self) -> dict[str, Any]:
        """What describes the trajectory in single values."""
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
class _Words:
    """What was last said to the model, and by it."""

    prompt: dict[str, Any] = field(default_factory=dict[str, Any])
    added: dict[str, Any] = field(default_factory=dict[str, Any])
    answer: dict[str, Any] = field(default_factory=dict[str, Any])


def tree_of(form: Form) -> Tree:
    """The spans of a trajectory. What a completion's span has as input is what is new in its context."""
    events, words = events_of(account_of(form)), _Words()
    timed: list[tuple[TimedEvent, dict[str, Any]]] = []
    began, ended = events[0], events[-1]
    assert isinstance(began, Began)
    assert isinstance(ended, Ended)
    reward: float | None = None
    incidents: list[Lost] = []
    for event in events:
        if isinstance(event, Prompted):
            words.prompt = words.added = _said(event.tokens.text, event.tokens.ids)
        elif isinstance(event, Observed):
            words.added = _said(event.tokens.text, event.tokens.ids)
        elif isinstance(event, Generated):
            timed.append((event, words.added))
            words.answer = _said(event.tokens.text, event.tokens.ids) or words.answer
        elif isinstance(event, CalledTool | Interacted | Waited):
            timed.append((event, {}))
        elif isinstance(event, Lost):
            incidents.append(event)
        elif isinstance(event, Rewarded):
            reward = event.reward
    start_ns = int(began.began_at * 1e9)
    return Tree(
        attributes=began.attributes,
        start_ns=start_ns,
        end_ns=start_ns + int(ended.seconds * 1e9),
        inputs=words.prompt,
        outputs=words.answer,
        ended=ended,
        reward=reward,
        incidents=incidents,
        nodes=_nodes(timed, start_ns=start_ns),
    )


def _nodes(timed: Sequence[tuple[TimedEvent, dict[str, Any]]], *, start_ns: int) -> list[SpanNode]:
    """One per event that was watched."""
    watched = [
        (event, event.time, inputs)
        for event, inputs in timed
        if event.time is not None and not _is_trifle(event, event.time)
    ]
    watched.sort(key=lambda entry: (entry[1].start, -entry[1].end, entry[1].span or math.inf))
    nodes: list[SpanNode] = []
    place_of: dict[int, int] = {}
    for event, time, inputs in watched:
        if time.span is not None:
            place_of[time.span] = len(nodes)
        nodes.append(
            _node(
                event,
                time,
                inputs,
                parent=None if time.within is None else place_of.get(time.within),
                start_ns=start_ns,
            )
        )
    return nodes


def _is_trifle(event: TimedEvent, time: Time) -> bool:
    """Waiting that took no time to speak of."""
    return (
        isinstance(event, Waited) and event.kind != WaitKind.USER and time.end - time.start < SHORTEST_WAIT_S
    )


def _node(
    event: TimedEvent, time: Time, inputs: dict[str, Any], *, parent: int | None, start_ns: int
) -> SpanNode:
    outputs: dict[str, Any] = {}
    error: str | None = None
    match event:
        case Generated():
            name, outputs = "generate", _said(event.tokens.text, event.tokens.ids)
        case CalledTool():
            name = event.name
            inputs = {} if event.arguments is None else {"arguments": event.arguments}
            outputs = _said(event.reply, None)
            error = None if event.incident is None else str(event.incident)
        case Interacted():
            name, outputs = "interaction", _said(event.reply, None)
        case Waited():
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


def _said(text: str | None, ids: TokenIds | None) -> dict[str, Any]:
    if text is not None:
        return {"text": text}
    return {} if ids is None else {"token_ids": ids}


def values_of_node(node: SpanNode) -> dict[str, Any]:
    """What describes a span in single values; those that are not known are left out."""
    event = node.event
    values: dict[str, Any] = {}
    match event:
        case Generated():
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
        case CalledTool():
            values = {"turn": event.turn, "number": event.number, "reward": event.reward}
        case Interacted():
            values = {"turn": event.turn, "reward": event.reward}
        case Waited():
            values = {"kind": event.kind, **(event.details.get("attributes") or {})}
    return {key: value for key, value in values.items() if value is not None}

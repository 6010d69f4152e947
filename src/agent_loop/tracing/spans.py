"""Nested spans of a trace document, which tracing systems expect."""

from __future__ import annotations

import math
from dataclasses import dataclass

from agent_loop.runtime.activity import WaitKind
from agent_loop.tracing.documents import Json

SHORTEST_WAIT_S = 0.001
ROOT_NAME = "agent_loop"

_VALUES = (
    "stop_reason",
    "reward",
    "num_turns",
    "num_prompt_tokens",
    "num_response_tokens",
    "num_model_tokens",
)
_NOT_ATTRIBUTES = ("event", "name", "time", "tokens", "arguments", "reply", "incident", "details")


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """Span of a trajectory."""

    event: str
    """Kind of its event: `generate`, `tool`, `interaction` or `span`. `agent` for the root."""
    name: str
    parent: int | None
    """Index of the enclosing span, which comes earlier; None for the root, which comes first."""
    start_ns: int
    """Nanoseconds since 1970."""
    end_ns: int
    inputs: Json
    outputs: Json
    attributes: Json
    """Scalar values that describe the span, without unknown ones."""
    error: str | None = None


def spans_of(document: Json) -> list[TraceSpan]:
    """Return the spans of a trajectory, sorted by start. Parents come before children.

    The input of a completion is what is new in its context. Waits below `SHORTEST_WAIT_S` are left out.
    """
    prompt, added, answer = ({}, {}, {})
    timed: list[tuple[Json, Json]] = []
    for event in document["events"]:
        kind = event["event"]
        if kind == "prompt":
            prompt = added = _text_or_ids(event["tokens"])
        elif kind == "observation":
            added = _text_or_ids(event["tokens"])
        elif kind == "generate":
            answer = _text_or_ids(event["tokens"]) or answer
        if event.get("time") is not None and not _is_negligible(event):
            timed.append((event, added if kind == "generate" else {}))
    timed.sort(key=lambda each: _order(each[0]["time"]))
    start_s: float = document["began_at"]
    values = document["attributes"] | {name: document[name] for name in _VALUES}
    root = TraceSpan(
        event="agent",
        name=values.pop("name", ROOT_NAME),
        parent=None,
        start_ns=int(start_s * 1e9),
        end_ns=int((start_s + document["seconds"]) * 1e9),
        inputs=prompt,
        outputs=answer,
        attributes=_known(values),
        error=document["failure"],
    )
    spans = [root]
    index_of: dict[int | None, int] = {}
    for event, inputs in timed:
        if event["time"]["span"] is not None:
            index_of[event["time"]["span"]] = len(spans)
        spans.append(_span_of(event, inputs, index_of.get(event["time"]["within"], 0), start_s))
    return spans


def _span_of(event: Json, inputs: Json, parent: int, start_s: float) -> TraceSpan:
    kind, time = event["event"], event["time"]
    name, outputs, error = kind, {}, None
    attributes = {key: value for key, value in event.items() if key not in _NOT_ATTRIBUTES}
    match kind:
        case "generate":
            outputs = _text_or_ids(event["tokens"])
            attributes |= {
                "num_context_tokens": event["tokens"]["place"],
                "num_tokens": event["tokens"]["count"],
            }
        case "tool":
            name, error = event["name"], event["incident"]
            inputs = _known({"arguments": event["arguments"]})
            outputs = _known({"text": event["reply"]})
        case "interaction":
            outputs = _known({"text": event["reply"]})
        case _:
            details = event["details"]
            name, error = event["name"] or event["kind"], details.get("error")
            inputs = details.get("inputs") or {}
            outputs = _known({"output": details.get("output")})
            attributes |= details.get("attributes") or {}
    return TraceSpan(
        event=kind,
        name=name,
        parent=parent,
        start_ns=int((start_s + time["start"]) * 1e9),
        end_ns=int((start_s + time["end"]) * 1e9),
        inputs=inputs,
        outputs=outputs,
        attributes=_known(attributes),
        error=None if error is None else str(error),
    )


def _order(time: Json) -> tuple[float, float, float]:
    return time["start"], -time["end"], math.inf if time["span"] is None else time["span"]


def _is_negligible(event: Json) -> bool:
    is_wait = event["event"] == "span" and event["kind"] != WaitKind.USER
    return is_wait and event["time"]["end"] - event["time"]["start"] < SHORTEST_WAIT_S


def _text_or_ids(tokens: Json) -> Json:
    return _known({"text": tokens["text"], "token_ids": tokens["ids"]})


def _known(values: Json) -> Json:
    return {key: value for key, value in values.items() if value is not None}

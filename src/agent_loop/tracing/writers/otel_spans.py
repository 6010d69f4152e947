"""A trajectory's spans as OpenTelemetry objects, for the MLflow and OTLP writers."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from agent_loop.tracing.span_tree import SpanTree


@dataclass(frozen=True, slots=True)
class SpanDescription:
    """Name, attributes and status of a span in a tracing system."""

    name: str
    attributes: Mapping[str, Any]
    kind: SpanKind = SpanKind.INTERNAL
    error: str | None = None
    events: Sequence[Event] = field(default_factory=tuple[Event, ...])


def new_trace_id() -> int:
    """Return a random trace id. The module `random` is not used, because its state belongs to the user."""
    return secrets.randbits(128) or 1


def readable_spans(
    span_tree: SpanTree,
    *,
    trace_id: int,
    root: SpanDescription,
    nodes: Sequence[SpanDescription],
    resource: Resource,
) -> list[ReadableSpan]:
    """Return the trajectory's root span, then the spans of its nodes.

    Args:
        nodes: One description per node of the tree, in order.
    """
    contexts = [_context(trace_id) for _ in range(len(nodes) + 1)]
    spans = [
        _span(
            root,
            contexts[0],
            parent=None,
            start_ns=span_tree.start_ns,
            end_ns=span_tree.end_ns,
            resource=resource,
        )
    ]
    for index, (node, description) in enumerate(zip(span_tree.nodes, nodes, strict=True), start=1):
        parent = contexts[0] if node.parent is None else contexts[node.parent + 1]
        spans.append(
            _span(
                description,
                contexts[index],
                parent=parent,
                start_ns=node.start_ns,
                end_ns=node.end_ns,
                resource=resource,
            )
        )
    return spans


def _context(trace_id: int) -> SpanContext:
    return SpanContext(
        trace_id, secrets.randbits(64) or 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)
    )


def _span(
    description: SpanDescription,
    context: SpanContext,
    *,
    parent: SpanContext | None,
    start_ns: int,
    end_ns: int,
    resource: Resource,
) -> ReadableSpan:
    error = description.error
    return ReadableSpan(
        name=description.name,
        context=context,
        parent=parent,
        resource=resource,
        attributes=description.attributes,
        events=description.events,
        kind=description.kind,
        status=Status(StatusCode.OK) if error is None else Status(StatusCode.ERROR, error),
        start_time=start_ns,
        end_time=end_ns,
    )

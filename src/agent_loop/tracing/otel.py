"""Trace writer for OTLP, with OpenTelemetry's semantic conventions for generative AI."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from agent_loop.config import TraceConfig
from agent_loop.errors import AgentLoopError
from agent_loop.loading import import_extra
from agent_loop.tracing.documents import Json
from agent_loop.tracing.spans import TraceSpan, spans_of


class ExportError(AgentLoopError):
    """A collector did not accept the spans."""


class OtelWriter:
    """Writer of one trace per trajectory, with one request per batch."""

    max_batch = 64

    def __init__(self, config: TraceConfig) -> None:
        exporter = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
        import_extra(exporter, extra="otel", by="rollout.trace.backend=otel")
        self._config = config
        self._exporter: Any = None
        self._resource: Any = None

    def open(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # late: optional
        from opentelemetry.sdk.resources import Resource

        self._resource = Resource.create({"service.name": self._config.project_name or "agent_loop"})
        self._exporter = OTLPSpanExporter(endpoint=self._config.otlp_endpoint)

    def write(self, items: Iterable[Json], /) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult  # late: optional

        spans = [
            span
            for item in items
            for span in readable_spans(
                spans_of(item), new_trace_id(), describe=_describe, resource=self._resource
            )
        ]
        if self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise ExportError(
                "the collector did not accept some traces; see the log of `opentelemetry`, and check "
                "rollout.trace.otlp_endpoint"
            )

    def close(self) -> None:
        self._exporter.shutdown()


def new_trace_id() -> int:
    """Return a random trace id. The module `random` is not used, because its state belongs to the user."""
    return secrets.randbits(128) or 1


def readable_spans(
    spans: Sequence[TraceSpan],
    trace_id: int,
    *,
    describe: Callable[[TraceSpan], tuple[str, Json]],
    resource: Any,
) -> list[Any]:
    """Return the spans of a trajectory as OpenTelemetry's objects.

    Args:
        spans: The root span, then its descendants.
        trace_id: Id of the trace.
        describe: Returns the name and the attributes of a span.
        resource: OpenTelemetry's description of the process.
    """
    from opentelemetry.sdk.trace import Event, ReadableSpan  # late: optional
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    flags = TraceFlags(TraceFlags.SAMPLED)
    contexts = [
        SpanContext(trace_id, secrets.randbits(64) or 1, is_remote=False, trace_flags=flags) for _ in spans
    ]
    readable: list[Any] = []
    for span, context in zip(spans, contexts, strict=True):
        name, attributes = describe(span)
        events: list[Event] = []
        if span.parent is None and "reward" in span.attributes:
            score = {
                "gen_ai.evaluation.name": "reward",
                "gen_ai.evaluation.score.value": span.attributes["reward"],
            }
            events.append(Event("gen_ai.evaluation.result", score, timestamp=span.end_ns))
        readable.append(
            ReadableSpan(
                name=name,
                context=context,
                parent=None if span.parent is None else contexts[span.parent],
                resource=resource,
                attributes=attributes,
                events=events,
                kind=SpanKind.CLIENT if span.event == "generate" else SpanKind.INTERNAL,
                status=Status(StatusCode.OK) if span.error is None else Status(StatusCode.ERROR, span.error),
                start_time=span.start_ns,
                end_time=span.end_ns,
            )
        )
    return readable


def _describe(span: TraceSpan) -> tuple[str, Json]:
    values, name = span.attributes, span.name
    attributes = {f"agent_loop.{key}": value for key, value in values.items()}
    attributes["error.type"] = None if span.error is None else span.error.partition(":")[0]
    conventions: Json = {}
    match span.event:
        case "agent":
            name = f"invoke_agent {values['agent_name']}"
            conventions = {
                "operation.name": "invoke_agent",
                "provider.name": "agent_loop",
                "agent.name": values["agent_name"],
                "conversation.id": values["trajectory_id"],
                "usage.input_tokens": values["num_prompt_tokens"],
                "usage.output_tokens": values["num_model_tokens"],
                "input.messages": _messages("user", span.inputs),
                "output.messages": _messages("assistant", span.outputs),
            }
        case "generate":
            name = "chat"
            conventions = {
                "operation.name": "chat",
                "provider.name": "agent_loop",
                "usage.input_tokens": values["num_context_tokens"],
                "usage.output_tokens": values["num_tokens"],
                "usage.cache_read.input_tokens": values.get("num_cached_tokens"),
                "response.time_to_first_chunk": values.get("prefill_s"),
                "input.messages": _messages("user", span.inputs),
                "output.messages": _messages("assistant", span.outputs),
            }
        case "tool":
            name = f"execute_tool {name}"
            conventions = {
                "operation.name": "execute_tool",
                "tool.name": span.name,
                "tool.type": "function",
                "tool.call.arguments": _json(span.inputs.get("arguments")),
                "tool.call.result": span.outputs.get("text"),
            }
        case "interaction":
            conventions = {"output.messages": _messages("user", span.outputs)}
        case _:
            attributes["agent_loop.inputs"] = _json(span.inputs or None)
            attributes["agent_loop.outputs"] = _json(span.outputs or None)
    attributes |= {f"gen_ai.{key}": value for key, value in conventions.items()}
    return name, {
        key: value if isinstance(value, (str, bool, int, float)) else _json(value)
        for key, value in attributes.items()
        if value is not None
    }


def _messages(role: str, values: Json) -> str | None:
    text = values.get("text")
    return None if text is None else _json([{"role": role, "parts": [{"type": "text", "content": text}]}])


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False)

"""Trace writer for OTLP, with OpenTelemetry's semantic conventions for generative AI."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from agent_loop.config import TraceConfig
from agent_loop.errors import AgentLoopError
from agent_loop.loading import import_extra
from agent_loop.tracing.events import GenerationEvent, InteractionEvent, ToolCallEvent
from agent_loop.tracing.json_traces import JsonTrace
from agent_loop.tracing.span_tree import SpanNode, SpanTree, build_span_tree, node_attributes

BY = "rollout.trace.backend=otel"


class ExportError(AgentLoopError):
    """A collector did not accept the spans."""


def make(config: TraceConfig) -> OtelWriter:
    """Return the writer.

    Raises:
        ConfigError: The packages of `agent-loop[otel]` are not installed.
    """
    import_extra("opentelemetry.exporter.otlp.proto.http.trace_exporter", extra="otel", by=BY)
    return OtelWriter(config)


class OtelWriter:
    """Writer of one trace per trajectory, with one request per batch."""

    max_batch = 64

    def __init__(self, config: TraceConfig) -> None:
        self._config = config
        self._exporter: Any = None
        self._resource: Any = None

    def open(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # late: optional
        from opentelemetry.sdk.resources import Resource

        self._resource = Resource.create({"service.name": self._config.project_name or "agent_loop"})
        self._exporter = OTLPSpanExporter(endpoint=self._config.otlp_endpoint)

    def write(self, items: Iterable[JsonTrace], /) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult  # late: optional

        spans = [span for item in items for span in self._spans_of(item)]
        if self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise ExportError(
                "the collector did not accept some traces; see the log of `opentelemetry`, and check "
                "rollout.trace.otlp_endpoint"
            )

    def close(self) -> None:
        self._exporter.shutdown()

    def _spans_of(self, form: JsonTrace) -> list[Any]:
        from opentelemetry.trace import SpanKind  # late: optional

        from agent_loop.tracing.writers.otel_spans import SpanDescription, new_trace_id, readable_spans

        span_tree = build_span_tree(form)
        root = SpanDescription(
            name=f"invoke_agent {span_tree.attributes.agent_name}",
            attributes=_known(_root_attributes(span_tree)),
            error=span_tree.ended.failure,
            events=_evaluation(span_tree),
        )
        nodes = [
            SpanDescription(
                name=_name_of(node),
                attributes=_known(_attributes_of(node)),
                kind=SpanKind.CLIENT if isinstance(node.event, GenerationEvent) else SpanKind.INTERNAL,
                error=node.error,
            )
            for node in span_tree.nodes
        ]
        return readable_spans(
            span_tree, trace_id=new_trace_id(), root=root, nodes=nodes, resource=self._resource
        )


def _root_attributes(span_tree: SpanTree) -> dict[str, Any]:
    attributes, values = span_tree.attributes, span_tree.values
    return {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "agent_loop",
        "gen_ai.agent.name": attributes.agent_name,
        "gen_ai.conversation.id": attributes.trajectory_id,
        "gen_ai.usage.input_tokens": span_tree.ended.num_prompt_tokens,
        "gen_ai.usage.output_tokens": span_tree.ended.num_model_tokens,
        "gen_ai.input.messages": _messages("user", span_tree.inputs.get("text")),
        "gen_ai.output.messages": _messages("assistant", span_tree.outputs.get("text")),
        "error.type": None if span_tree.ended.failure is None else span_tree.ended.failure.partition(":")[0],
        "agent_loop.step": attributes.step,
        "agent_loop.sample_index": attributes.sample_index,
        "agent_loop.rollout_n": attributes.rollout_n,
        "agent_loop.validate": attributes.validate,
        "agent_loop.experiment_name": attributes.experiment_name,
        **{f"agent_loop.{name}": value for name, value in values.items()},
    }


def _name_of(node: SpanNode) -> str:
    if isinstance(node.event, GenerationEvent):
        return "chat"
    return f"execute_tool {node.name}" if isinstance(node.event, ToolCallEvent) else node.name


def _attributes_of(node: SpanNode) -> dict[str, Any]:
    event = node.event
    attributes = {f"agent_loop.{name}": value for name, value in node_attributes(node).items()}
    attributes["error.type"] = node.error
    if isinstance(event, GenerationEvent):
        return attributes | {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "agent_loop",
            "gen_ai.usage.input_tokens": event.tokens.place,
            "gen_ai.usage.output_tokens": event.tokens.count,
            "gen_ai.usage.cache_read.input_tokens": event.num_cached_tokens,
            "gen_ai.response.time_to_first_chunk": event.prefill_s,
            "gen_ai.input.messages": _messages("user", node.inputs.get("text")),
            "gen_ai.output.messages": _messages("assistant", node.outputs.get("text")),
        }
    if isinstance(event, ToolCallEvent):
        return attributes | {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": event.name,
            "gen_ai.tool.type": "function",
            "gen_ai.tool.call.arguments": _json(event.arguments),
            "gen_ai.tool.call.result": event.reply,
        }
    if isinstance(event, InteractionEvent):
        return attributes | {"gen_ai.output.messages": _messages("user", event.reply)}
    return attributes | {
        "agent_loop.inputs": _json(node.inputs or None),
        "agent_loop.outputs": _json(node.outputs or None),
    }


def _evaluation(span_tree: SpanTree) -> tuple[Any, ...]:
    from opentelemetry.sdk.trace import Event  # late: optional

    if span_tree.reward is None:
        return ()
    attributes = {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": span_tree.reward}
    return (Event("gen_ai.evaluation.result", attributes, timestamp=span_tree.end_ns),)


def _messages(role: str, text: str | None) -> str | None:
    return None if text is None else _json([{"role": role, "parts": [{"type": "text", "content": text}]}])


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False)


def _known(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes that are set. Values other than numbers, strings and booleans become JSON."""
    return {
        name: value if isinstance(value, (str, bool, int, float)) else _json(value)
        for name, value in attributes.items()
        if value is not None
    }

"""Trace writer for MLflow's tracking store."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import numpy as np
import orjson

from agent_loop.config import TraceConfig
from agent_loop.loading import import_extra
from agent_loop.tracing.events import GenerationEvent, InteractionEvent, ToolCallEvent
from agent_loop.tracing.json_traces import JsonTrace
from agent_loop.tracing.span_tree import SpanNode, SpanTree, build_span_tree, node_attributes

BY = "rollout.trace.backend=mlflow"


def make(config: TraceConfig) -> MlflowWriter:
    """Return the writer.

    Raises:
        ConfigError: The package of `agent-loop[mlflow]` is not installed.
    """
    # MLflow's own telemetry is off unless the user enables it.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    import_extra("mlflow", extra="mlflow", by=BY)
    return MlflowWriter(config)


class MlflowWriter:
    """Writer of one MLflow trace per trajectory, with one call of the store per batch.

    MLflow's own exporter makes a call per span and does not report failures. The process's tracking URI is not changed.
    """

    max_batch = 16

    def __init__(self, config: TraceConfig) -> None:
        self._config = config
        self._client: Any = None
        self._experiment_id = ""
        self._resource: Any = None

    def open(self) -> None:
        from opentelemetry.sdk.resources import Resource  # late: optional

        self._resource = Resource({})
        uri, project = self._config.tracking_uri, self._config.project_name or "agent_loop"
        self._experiment_id = experiment_id(uri, project)
        self._client = import_module("mlflow.tracing.client").TracingClient(uri)

    def write(self, items: Iterable[JsonTrace], /) -> None:
        self._client.log_spans(self._experiment_id, [span for item in items for span in self._spans_of(item)])

    def close(self) -> None:
        """Do nothing: the writer has no buffer."""

    def _spans_of(self, form: JsonTrace) -> list[Any]:
        from agent_loop.tracing.writers.otel_spans import (  # late: optional
            SpanDescription,
            new_trace_id,
            readable_spans,
        )

        span_tree = build_span_tree(form)
        number = new_trace_id()
        trace_id = f"tr-{number:032x}"
        root = SpanDescription(
            name=span_tree.attributes.name,
            attributes=_attributes(
                trace_id,
                "AGENT",
                span_tree.inputs,
                span_tree.outputs,
                {**span_tree.values, **_tags_of(span_tree)},
            ),
            error=span_tree.ended.failure,
        )
        nodes = [
            SpanDescription(name=node.name, attributes=_attributes_of(node, trace_id), error=node.error)
            for node in span_tree.nodes
        ]
        spans = readable_spans(span_tree, trace_id=number, root=root, nodes=nodes, resource=self._resource)
        as_span = import_module("mlflow.entities").Span
        return [as_span(span) for span in spans]


def _tags_of(span_tree: SpanTree) -> dict[str, str]:
    """Return the attributes that MLflow turns into tags of the trace."""
    tags = span_tree.attributes.named() | {
        "mlflow.traceName": span_tree.attributes.name,
        "stop_reason": span_tree.ended.stop_reason,
        "reward": span_tree.reward,
    }
    return {f"mlflow.traceTag.{name}": str(value) for name, value in tags.items() if value is not None}


def experiment_id(tracking_uri: str | None, name: str) -> str:
    """Return the id of the experiment with a name. Create the experiment if it does not exist."""
    mlflow: Any = import_module("mlflow")
    client = mlflow.MlflowClient(tracking_uri)
    found = client.get_experiment_by_name(name)
    if found is not None:
        return found.experiment_id
    try:
        return client.create_experiment(name)
    except mlflow.MlflowException:  # another process created it first
        found = client.get_experiment_by_name(name)
        if found is None:
            raise
        return found.experiment_id


def _attributes_of(node: SpanNode, trace_id: str) -> dict[str, str]:
    event, values = node.event, node_attributes(node)
    match event:
        case GenerationEvent():
            kind = "LLM"
            num_read, num_written = event.tokens.place, event.tokens.count
            values["mlflow.chat.tokenUsage"] = {
                "input_tokens": num_read,
                "output_tokens": num_written,
                "total_tokens": num_read + num_written,
            }
        case ToolCallEvent():
            kind = "TOOL"
        case InteractionEvent():
            kind = "CHAIN"
        case _:
            kind = "UNKNOWN"
    return _attributes(trace_id, kind, node.inputs, node.outputs, values)


def _attributes(
    trace_id: str, kind: str, inputs: dict[str, Any], outputs: dict[str, Any], values: dict[str, Any]
) -> dict[str, str]:
    """Return the attributes of a span, each encoded as JSON as MLflow stores it."""
    plain = {
        "mlflow.traceRequestId": trace_id,
        "mlflow.spanType": kind,
        "mlflow.spanInputs": inputs,
        "mlflow.spanOutputs": outputs,
        **values,
    }
    return {name: _json(value) for name, value in plain.items()}


def _json(value: Any) -> str:
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode()
    except orjson.JSONEncodeError:  # lone surrogates, or integers beyond 64 bits
        return json.dumps(value, default=np.ndarray.tolist)

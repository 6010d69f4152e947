"""Traces in MLflow's tracking store."""

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
from agent_loop.tracing.events import CalledTool, Generated, Interacted
from agent_loop.tracing.forms import Form
from agent_loop.tracing.tree import SpanNode, Tree, tree_of, values_of_node

BY = "rollout.trace.backend=mlflow"


def make(config: TraceConfig) -> MlflowWriter:
    """Raises: ConfigError: The package of `agent-loop[mlflow]` is not installed."""
    # What telemetry there is, is for whoever runs it to decide.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    import_extra("mlflow", extra="mlflow", by=BY)
    return MlflowWriter(config)


class MlflowWriter:
    """Keeps each trajectory as one trace, those of a batch in one call of the store. MLflow's own exporter would make a
    call for each span, and tell nobody that it failed; nor does this touch the tracking URI that the process has."""

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

    def write(self, items: Iterable[Form], /) -> None:
        self._client.log_spans(self._experiment_id, [span for item in items for span in self._spans_of(item)])

    def close(self) -> None:
        """Nothing is held back."""

    def _spans_of(self, form: Form) -> list[Any]:
        from agent_loop.tracing.writers.otel_spans import (  # late: optional
            Description,
            new_trace_id,
            readable_spans,
        )

        tree = tree_of(form)
        number = new_trace_id()
        trace_id = f"tr-{number:032x}"
        root = Description(
            name=tree.attributes.name,
            attributes=_attributes(
                trace_id, "AGENT", tree.inputs, tree.outputs, {**tree.values, **_tags_of(tree)}
            ),
            error=tree.ended.failure,
        )
        nodes = [
            Description(name=node.name, attributes=_attributes_of(node, trace_id), error=node.error)
            for node in tree.nodes
        ]
        spans = readable_spans(tree, trace_id=number, root=root, nodes=nodes, resource=self._resource)
        as_span = import_module("mlflow.entities").Span
        return [as_span(span) for span in spans]


def _tags_of(tree: Tree) -> dict[str, str]:
    """MLflow makes tags of the trace of them."""
    tags = tree.attributes.named() | {
        "mlflow.traceName": tree.attributes.name,
        "stop_reason": tree.ended.stop_reason,
        "reward": tree.reward,
    }
    return {f"mlflow.traceTag.{name}": str(value) for name, value in tags.items() if value is not None}


def experiment_id(tracking_uri: str | None, name: str) -> str:
    """The experiment of that name; made if there is none."""
    mlflow: Any = import_module("mlflow")
    client = mlflow.MlflowClient(tracking_uri)
    found = client.get_experiment_by_name(name)
    if found is not None:
        return found.experiment_id
    try:
        return client.create_experiment(name)
    except mlflow.MlflowException:  # another process was quicker
        found = client.get_experiment_by_name(name)
        if found is None:
            raise
        return found.experiment_id


def _attributes_of(node: SpanNode, trace_id: str) -> dict[str, str]:
    event, values = node.event, values_of_node(node)
    match event:
        case Generated():
            kind = "LLM"
            num_read, num_written = event.tokens.place, event.tokens.count
            values["mlflow.chat.tokenUsage"] = {
                "input_tokens": num_read,
                "output_tokens": num_written,
                "total_tokens": num_read + num_written,
            }
        case CalledTool():
            kind = "TOOL"
        case Interacted():
            kind = "CHAIN"
        case _:
            kind = "UNKNOWN"
    return _attributes(trace_id, kind, node.inputs, node.outputs, values)


def _attributes(
    trace_id: str, kind: str, inputs: dict[str, Any], outputs: dict[str, Any], values: dict[str, Any]
) -> dict[str, str]:
    """MLflow keeps every attribute as JSON."""
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
    except orjson.JSONEncodeError:  # halves of surrogates, or numbers beyond 64 bits
        return json.dumps(value, default=np.ndarray.tolist)

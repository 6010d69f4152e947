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
from agent_loop.tracing.documents import Json
from agent_loop.tracing.otel import new_trace_id, readable_spans
from agent_loop.tracing.spans import TraceSpan, spans_of

_SPAN_TYPES = {"agent": "AGENT", "generate": "LLM", "tool": "TOOL", "interaction": "CHAIN"}


class MlflowWriter:
    """Writer of one MLflow trace per trajectory, with one call of the store per batch.

    MLflow's own exporter makes a call per span and does not report failures. The process's tracking URI is not changed.
    """

    max_batch = 16

    def __init__(self, config: TraceConfig) -> None:
        # MLflow's own telemetry is off unless the user enables it.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        import_extra("mlflow", extra="mlflow", by="rollout.trace.backend=mlflow")
        self._config = config
        self._client: Any = None
        self._experiment_id = ""

    def open(self) -> None:
        uri, project = self._config.tracking_uri, self._config.project_name or "agent_loop"
        self._experiment_id = experiment_id(uri, project)
        self._client = import_module("mlflow.tracing.client").TracingClient(uri)

    def write(self, items: Iterable[Json], /) -> None:
        self._client.log_spans(self._experiment_id, [span for item in items for span in _mlflow_spans(item)])

    def close(self) -> None:
        """Do nothing: the writer has no buffer."""


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


def _mlflow_spans(document: Json) -> list[Any]:
    from opentelemetry.sdk.resources import Resource  # late: optional

    as_span = import_module("mlflow.entities").Span
    trace_id = new_trace_id()

    def describe(span: TraceSpan) -> tuple[str, Json]:
        values: Json = {
            "mlflow.traceRequestId": f"tr-{trace_id:032x}",
            "mlflow.spanType": _SPAN_TYPES.get(span.event, "UNKNOWN"),
            "mlflow.spanInputs": span.inputs,
            "mlflow.spanOutputs": span.outputs,
            **span.attributes,
        }
        if span.event == "agent":
            tags = span.attributes | {"mlflow.traceName": span.name}
            values |= {f"mlflow.traceTag.{name}": str(value) for name, value in tags.items()}
        if span.event == "generate":
            num_read, num_written = span.attributes["num_context_tokens"], span.attributes["num_tokens"]
            values["mlflow.chat.tokenUsage"] = {
                "input_tokens": num_read,
                "output_tokens": num_written,
                "total_tokens": num_read + num_written,
            }
        return span.name, {name: _json(value) for name, value in values.items()}

    spans = readable_spans(spans_of(document), trace_id, describe=describe, resource=Resource({}))
    return [as_span(span) for span in spans]


def _json(value: Any) -> str:
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode()
    except orjson.JSONEncodeError:  # lone surrogates, or integers beyond 64 bits
        return json.dumps(value, default=np.ndarray.tolist)

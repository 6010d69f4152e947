"""Trace writer for Weave."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib import import_module
from typing import Any

import numpy as np

from agent_loop.config import TraceConfig
from agent_loop.errors import AgentLoopError
from agent_loop.loading import import_extra
from agent_loop.tracing.background_writer import OneAtATimeWriter
from agent_loop.tracing.json_traces import JsonTrace
from agent_loop.tracing.span_tree import build_span_tree, node_attributes


class FailedSpan(AgentLoopError):
    """Error that marks a call in Weave as failed."""


def make(config: TraceConfig) -> OneAtATimeWriter[JsonTrace]:
    """Return the writer.

    Raises:
        ConfigError: The package of `agent-loop[weave]` is not installed.
    """
    import_extra("weave", extra="weave", by="rollout.trace.backend=weave")
    return OneAtATimeWriter(WeaveWriter(config))


class WeaveWriter:
    """Writer of one Weave call per trajectory, with nested calls for its spans. Weave sends them from its own
    threads."""

    def __init__(self, config: TraceConfig) -> None:
        self._config = config
        self._client: Any = None

    def open(self) -> None:
        self._client = import_module("weave").init(self._config.project_name or "agent_loop")

    def write(self, item: JsonTrace, /) -> None:
        span_tree = build_span_tree(item)
        attributes = span_tree.attributes
        root = self._begin(
            attributes.name, span_tree.inputs, attributes.named(), parent=None, start_ns=span_tree.start_ns
        )
        calls: list[Any] = []
        for node in span_tree.nodes:
            parent = root if node.parent is None else calls[node.parent]
            calls.append(
                self._begin(
                    node.name, node.inputs, node_attributes(node), parent=parent, start_ns=node.start_ns
                )
            )
        for node, call in zip(span_tree.nodes, calls, strict=True):
            self._end(call, node.outputs, error=node.error, end_ns=node.end_ns)
        self._end(
            root,
            {**span_tree.outputs, **span_tree.values},
            error=span_tree.ended.failure,
            end_ns=span_tree.end_ns,
        )

    def close(self) -> None:
        self._client.flush()

    def _begin(
        self, name: str, inputs: dict[str, Any], attributes: dict[str, Any], *, parent: Any, start_ns: int
    ) -> Any:
        return self._client.create_call(
            name,
            _listed(inputs),
            parent=parent,
            attributes=attributes,
            use_stack=False,
            started_at=_moment(start_ns),
        )

    def _end(self, call: Any, outputs: dict[str, Any], *, error: str | None, end_ns: int) -> None:
        exception = None if error is None else FailedSpan(error)
        self._client.finish_call(call, output=_listed(outputs), exception=exception, ended_at=_moment(end_ns))


def _listed(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with arrays as lists, because Weave does not accept arrays."""
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()
    }


def _moment(nanoseconds: int) -> datetime:
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC)

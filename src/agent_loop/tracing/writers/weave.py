"""Calls in Weave."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib import import_module
from typing import Any

import numpy as np

from agent_loop.config import TraceConfig
from agent_loop.errors import AgentLoopError
from agent_loop.loading import import_extra
from agent_loop.tracing.delivery import OneByOne
from agent_loop.tracing.forms import Form
from agent_loop.tracing.tree import tree_of, values_of_node


class FailedSpan(AgentLoopError):
    """How a call in Weave is shown to have failed."""


def make(config: TraceConfig) -> OneByOne[Form]:
    """Raises: ConfigError: The package of `agent-loop[weave]` is not installed."""
    import_extra("weave", extra="weave", by="rollout.trace.backend=weave")
    return OneByOne(WeaveWriter(config))


class WeaveWriter:
    """Keeps each trajectory as a call with calls below it. Weave sends them from threads of its own."""

    def __init__(self, config: TraceConfig) -> None:
        self._config = config
        self._client: Any = None

    def open(self) -> None:
        self._client = import_module("weave").init(self._config.project_name or "agent_loop")

    def write(self, item: Form, /) -> None:
        tree = tree_of(item)
        attributes = tree.attributes
        root = self._begin(
            attributes.name, tree.inputs, attributes.named(), parent=None, start_ns=tree.start_ns
        )
        calls: list[Any] = []
        for node in tree.nodes:
            parent = root if node.parent is None else calls[node.parent]
            calls.append(
                self._begin(
                    node.name, node.inputs, values_of_node(node), parent=parent, start_ns=node.start_ns
                )
            )
        for node, call in zip(tree.nodes, calls, strict=True):
            self._end(call, node.outputs, error=node.error, end_ns=node.end_ns)
        self._end(root, {**tree.outputs, **tree.values}, error=tree.ended.failure, end_ns=tree.end_ns)

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
    """Weave does not know arrays of token ids."""
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()
    }


def _moment(nanoseconds: int) -> datetime:
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC)

"""Trace writer for Weave."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

import numpy as np

from agent_loop.config import TraceConfig
from agent_loop.errors import AgentLoopError
from agent_loop.loading import import_extra
from agent_loop.tracing.documents import Json
from agent_loop.tracing.spans import spans_of


class FailedSpan(AgentLoopError):
    """Error that marks a call in Weave as failed."""


class WeaveWriter:
    """Writer of one Weave call per trajectory, with nested calls for its spans. Weave sends them from its own
    threads."""

    max_batch = 1

    def __init__(self, config: TraceConfig) -> None:
        import_extra("weave", extra="weave", by="rollout.trace.backend=weave")
        self._config = config
        self._client: Any = None

    def open(self) -> None:
        self._client = import_module("weave").init(self._config.project_name or "agent_loop")

    def write(self, items: Iterable[Json], /) -> None:
        for item in items:
            self._write(item)

    def close(self) -> None:
        self._client.flush()

    def _write(self, document: Json) -> None:
        spans, calls = spans_of(document), list[Any]()
        for span in spans:
            call = self._client.create_call(
                span.name,
                _listed(span.inputs),
                parent=None if span.parent is None else calls[span.parent],
                attributes=span.attributes,
                use_stack=False,
                started_at=_moment(span.start_ns),
            )
            calls.append(call)
        for span, call in reversed(list(zip(spans, calls, strict=True))):
            outputs = span.outputs | span.attributes if span.parent is None else span.outputs
            self._client.finish_call(
                call,
                output=_listed(outputs),
                exception=None if span.error is None else FailedSpan(span.error),
                ended_at=_moment(span.end_ns),
            )


def _listed(values: Json) -> Json:
    """Return the values with arrays as lists, because Weave does not accept arrays."""
    return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in values.items()}


def _moment(nanoseconds: int) -> datetime:
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC)

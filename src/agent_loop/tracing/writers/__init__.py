"""Trace writers: one module per backend, which imports its package on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from agent_loop.config import TraceConfig
from agent_loop.tracing.background_writer import BatchWriter
from agent_loop.tracing.json_traces import JsonTrace

MODULES: Mapping[str, str] = {name: f"{__name__}.{name}" for name in ("file", "mlflow", "otel", "weave")}


def make_writer(backend: str, config: TraceConfig) -> BatchWriter[JsonTrace]:
    """Return the writer of a backend. It connects in `open`.

    Raises:
        ConfigError: The backend's package is not installed.
    """
    make: Callable[[TraceConfig], Any] = import_module(MODULES[backend]).make
    return make(config)

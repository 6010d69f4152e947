"""Where finished trajectories are told: one module per place, its package imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from agent_loop.config import TraceConfig
from agent_loop.tracing.delivery import BatchWriter
from agent_loop.tracing.forms import Form

MODULES: Mapping[str, str] = {name: f"{__name__}.{name}" for name in ("file", "mlflow", "otel", "weave")}


def make_writer(backend: str, config: TraceConfig) -> BatchWriter[Form]:
    """The writer of a backend; it connects to nothing yet.

    Raises:
        ConfigError: The package that it needs is not installed.
    """
    make: Callable[[TraceConfig], Any] = import_module(MODULES[backend]).make
    return make(config)

"""Loggers of training metrics besides `metrics.jsonl`: one module each, which imports its package when it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from agent_loop.config import Config
from agent_loop.tracing.background_writer import BackgroundWriter, ItemWriter, OneAtATimeWriter

LOGGER_TIMEOUT_S = 30.0
"""Seconds that the end of a run waits for each logger."""
MAX_QUEUED = 10_000
"""Maximum number of steps that are queued for a logger."""
NOT_A_LOGGER = "console"
"""Logger of other systems' configurations; here the console is always on."""


@dataclass(frozen=True, slots=True)
class Scalars:
    """Metrics of a step that are finite numbers."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RunNames:
    """Names and settings of a run."""

    project: str
    experiment: str
    run_dir: Path
    config: Mapping[str, Any]
    tracking_uri: str | None
    """Tracking URI of MLflow."""

    @classmethod
    def of(cls, config: Config) -> RunNames:
        trainer = config.trainer
        return cls(
            project=trainer.project_name,
            experiment=trainer.experiment_name or Path(trainer.run_dir).name,
            run_dir=Path(trainer.run_dir),
            config=config.model_dump(mode="json"),
            tracking_uri=config.rollout.trace.tracking_uri,
        )


def make_loggers(config: Config) -> list[BackgroundWriter[Scalars]]:
    """Return the loggers that `trainer.logger` names, which are not connected yet.

    Raises:
        ConfigError: The package of a logger is not installed.
    """
    names = RunNames.of(config)
    given = config.trainer.logger
    wanted = [logger for logger in ([given] if isinstance(given, str) else given) if logger != NOT_A_LOGGER]
    return [
        BackgroundWriter(
            OneAtATimeWriter(_make(logger)(names)), name=f"metrics to {logger}", max_queued=MAX_QUEUED
        )
        for logger in wanted
    ]


def _make(logger: str) -> Callable[[RunNames], ItemWriter[Scalars]]:
    return import_module(f"{__name__}.{logger}").make


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by their dotted names."""
    named: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        named |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}  # pyright: ignore
    return named


__all__: Sequence[str] = ["LOGGER_TIMEOUT_S", "RunNames", "Scalars", "flat", "make_loggers"]

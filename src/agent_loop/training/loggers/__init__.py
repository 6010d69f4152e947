"""Where the metrics of training go beside `metrics.jsonl`: one module per place, its package imported late."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from agent_loop.config import Config
from agent_loop.tracing.delivery import Delivery, OneByOne, Writer

LOGGER_TIMEOUT_S = 30.0
"""How long the end of a run waits for each."""
MAX_QUEUED = 10_000
"""Steps that may wait for one."""
NOT_A_LOGGER = "console"
"""Named in configurations of other systems; here it is always there."""


@dataclass(frozen=True, slots=True)
class Scalars:
    """The metrics of a step, as far as they are finite numbers."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RunNames:
    """What a run is called, and what it is."""

    project: str
    experiment: str
    run_dir: Path
    config: Mapping[str, Any]
    tracking_uri: str | None
    """MLflow's."""

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


def make_loggers(config: Config) -> list[Delivery[Scalars]]:
    """Those that `trainer.logger` names; they connect to nothing yet.

    Raises:
        ConfigError: A package that one needs is not installed.
    """
    names = RunNames.of(config)
    given = config.trainer.logger
    wanted = [logger for logger in ([given] if isinstance(given, str) else given) if logger != NOT_A_LOGGER]
    return [
        Delivery(OneByOne(_make(logger)(names)), name=f"metrics to {logger}", max_queued=MAX_QUEUED)
        for logger in wanted
    ]


def _make(logger: str) -> Callable[[RunNames], Writer[Scalars]]:
    return import_module(f"{__name__}.{logger}").make


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names."""
    named: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        named |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}  # pyright: ignore
    return named


__all__: Sequence[str] = ["LOGGER_TIMEOUT_S", "RunNames", "Scalars", "flat", "make_loggers"]

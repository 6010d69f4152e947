"""Loggers of training metrics besides `metrics.jsonl`. Each imports its package when a run names it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from agent_loop.config import Config
from agent_loop.loading import import_extra
from agent_loop.runtime.background_writer import BackgroundWriter
from agent_loop.tracing.mlflow import experiment_id

LOGGER_TIMEOUT_S = 30.0
"""Seconds that the end of a run waits for each logger."""
MAX_QUEUED = 10_000
"""Maximum number of steps that are queued for a logger."""
NOT_A_LOGGER = "console"
"""Logger of other systems' configurations; here the console is always on."""
TENSORBOARD_FOLDER = "tensorboard"
MAX_MLFLOW_PARAMETER = 500
"""Maximum length of a setting's value in characters; longer values are cut."""

_NOT_ALLOWED_BY_MLFLOW = re.compile(r"[^\w\-. :/]")


@dataclass(frozen=True, slots=True)
class Scalars:
    """Metrics of a step that are finite numbers."""

    step: int
    values: Mapping[str, float]


def make_loggers(config: Config) -> list[BackgroundWriter[Scalars]]:
    """Return the loggers that `trainer.logger` names, which are not connected yet."""
    given = config.trainer.logger
    names = [name for name in ([given] if isinstance(given, str) else given) if name != NOT_A_LOGGER]
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # off unless the user switches it on
    for name in names:
        import_extra(name, extra=name, by=f"trainer.logger=[{name}]")
    return [
        BackgroundWriter(_LOGGERS[name](config), name=f"metrics to {name}", max_queued=MAX_QUEUED)
        for name in names
    ]


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by their dotted names."""
    named: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        named |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}  # pyright: ignore
    return named


class MlflowLogger:
    """Logger to a run of the experiment with the project's name. The settings are the run's parameters."""

    max_batch = 1

    def __init__(self, config: Config) -> None:
        self._config = config
        self._client: Any = None
        self._run_id = ""

    def open(self) -> None:
        param: Any = import_module("mlflow.entities").Param
        uri = self._config.rollout.trace.tracking_uri
        client: Any = import_module("mlflow").MlflowClient(uri)
        experiment = experiment_id(uri, self._config.trainer.project_name)
        run_id = client.create_run(experiment, run_name=_experiment(self._config)).info.run_id
        settings = flat(self._config.model_dump(mode="json"))
        parameters = [param(key, str(value)[:MAX_MLFLOW_PARAMETER]) for key, value in settings.items()]
        client.log_batch(run_id, params=parameters)
        self._client, self._run_id = client, run_id

    def write(self, items: Iterable[Scalars], /) -> None:
        (item,) = items
        metric: Any = import_module("mlflow.entities").Metric
        now_ms = int(time.time() * 1000)
        metrics = [
            metric(_NOT_ALLOWED_BY_MLFLOW.sub("_", name), value, now_ms, item.step)
            for name, value in item.values.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class TensorboardLogger:
    """Logger to a subfolder of the run's folder."""

    max_batch = 1

    def __init__(self, config: Config) -> None:
        self._folder = Path(config.trainer.run_dir) / TENSORBOARD_FOLDER
        self._writer: Any = None

    def open(self) -> None:
        self._writer = import_module("torch.utils.tensorboard").SummaryWriter(str(self._folder))

    def write(self, items: Iterable[Scalars], /) -> None:
        (item,) = items
        for name, value in item.values.items():
            self._writer.add_scalar(name, value, item.step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """Logger to a run of the project. A resumed training creates another run in the same group."""

    max_batch = 1

    def __init__(self, config: Config) -> None:
        self._config = config
        self._run: Any = None

    def open(self) -> None:
        wandb: Any = import_module("wandb")
        trainer, name = self._config.trainer, _experiment(self._config)
        Path(trainer.run_dir).mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=trainer.project_name,
            name=name,
            group=name,
            dir=trainer.run_dir,
            config=self._config.model_dump(mode="json"),
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, items: Iterable[Scalars], /) -> None:
        (item,) = items
        self._run.log({"step": item.step, **item.values})

    def close(self) -> None:
        self._run.finish()


_LOGGERS = {"mlflow": MlflowLogger, "tensorboard": TensorboardLogger, "wandb": WandbLogger}


def _experiment(config: Config) -> str:
    return config.trainer.experiment_name or Path(config.trainer.run_dir).name

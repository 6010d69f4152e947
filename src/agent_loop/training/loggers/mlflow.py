"""Metrics in MLflow's tracking store."""

from __future__ import annotations

import os
import re
import time
from importlib import import_module
from typing import Any

from agent_loop.loading import import_extra
from agent_loop.tracing.mlflow import experiment_id
from agent_loop.training.loggers import RunNames, Scalars, flat

MAX_PARAMETER = 500
"""Maximum length of a setting's value in characters; longer values are cut."""
MAX_PARAMETERS_AT_ONCE = 100

_NOT_ALLOWED = re.compile(r"[^\w\-. :/]")


def make(names: RunNames) -> MlflowLogger:
    """Return the logger.

    Raises:
        ConfigError: The package of `agent-loop[mlflow]` is not installed.
    """
    # Telemetry is off unless the user switches it on.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    import_extra("mlflow", extra="mlflow", by="trainer.logger=[mlflow]")
    return MlflowLogger(names)


class MlflowLogger:
    """Logger to a run of the experiment with the project's name. The settings are the run's parameters."""

    def __init__(self, names: RunNames) -> None:
        self._names = names
        self._client: Any = None
        self._run_id = ""

    def open(self) -> None:
        param: Any = import_module("mlflow.entities").Param
        names = self._names
        client: Any = import_module("mlflow").MlflowClient(names.tracking_uri)
        experiment = experiment_id(names.tracking_uri, names.project)
        run_id = client.create_run(experiment, run_name=names.experiment).info.run_id
        parameters = [param(key, str(value)[:MAX_PARAMETER]) for key, value in flat(names.config).items()]
        for start in range(0, len(parameters), MAX_PARAMETERS_AT_ONCE):
            client.log_batch(run_id, params=parameters[start : start + MAX_PARAMETERS_AT_ONCE])
        self._client, self._run_id = client, run_id

    def write(self, item: Scalars, /) -> None:
        metric: Any = import_module("mlflow.entities").Metric
        now_ms = int(time.time() * 1000)
        self._client.log_batch(
            self._run_id,
            metrics=[
                metric(_NOT_ALLOWED.sub("_", name), value, now_ms, item.step)
                for name, value in item.values.items()
            ],
        )

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

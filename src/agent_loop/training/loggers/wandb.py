"""Metrics in Weights & Biases."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from agent_loop.loading import import_extra
from agent_loop.training.loggers import RunNames, Scalars


def make(names: RunNames) -> WandbLogger:
    """Return the logger.

    Raises:
        ConfigError: The package of `agent-loop[wandb]` is not installed.
    """
    import_extra("wandb", extra="wandb", by="trainer.logger=[wandb]")
    return WandbLogger(names)


class WandbLogger:
    """Logger to a run of the project. A resumed training creates another run in the same group."""

    def __init__(self, names: RunNames) -> None:
        self._names = names
        self._run: Any = None

    def open(self) -> None:
        wandb: Any = import_module("wandb")
        names = self._names
        names.run_dir.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=names.project,
            name=names.experiment,
            group=names.experiment,
            dir=str(names.run_dir),
            config=dict(names.config),
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, item: Scalars, /) -> None:
        self._run.log({"step": item.step, **item.values})

    def close(self) -> None:
        self._run.finish()

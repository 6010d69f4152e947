"""Metrics in TensorBoard's event files."""

from __future__ import annotations

from typing import Any

from agent_loop.loading import import_extra
from agent_loop.training.loggers import RunNames, Scalars

FOLDER = "tensorboard"


def make(names: RunNames) -> TensorboardLogger:
    """Return the logger.

    Raises:
        ConfigError: The package of `agent-loop[tensorboard]` is not installed.
    """
    import_extra("tensorboard", extra="tensorboard", by="trainer.logger=[tensorboard]")
    return TensorboardLogger(names)


class TensorboardLogger:
    """Logger to a subfolder of the run's folder."""

    def __init__(self, names: RunNames) -> None:
        self._folder = names.run_dir / FOLDER
        self._writer: Any = None

    def open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter  # late: optional

        self._writer = SummaryWriter(str(self._folder))

    def write(self, item: Scalars, /) -> None:
        for name, value in item.values.items():
            self._writer.add_scalar(name, value, item.step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

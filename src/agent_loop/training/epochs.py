"""Number of steps of a training whose length is given in epochs."""

from __future__ import annotations

from agent_loop.config import Config


def with_total_steps(config: Config, *, num_rows: int) -> Config:
    """Return the configuration with `trainer.total_steps` for its `trainer.total_epochs`, if it has any.

    Args:
        num_rows: Number of training rows.
    """
    epochs = config.trainer.total_epochs
    if epochs is None:
        return config
    steps = max(1, num_rows // config.data.train_batch_size * epochs)
    trainer = config.trainer.model_copy(update={"total_steps": steps})
    return config.model_copy(update={"trainer": trainer})

"""Rollouts, evaluations and trainings from Python and from notebooks.

    from agent_loop.api import rollout_sync

    rollout_sync("config.yaml", [{"prompt": "What is 12 * 34?"}], n=4)

`rollout`, `evaluate` and `Trainer.fit` are coroutines. Each has a twin whose name ends in `_sync`, which works
while an event loop is running too.
"""

from agent_loop.api.runs import (
    Rollout,
    Trainer,
    TrajectoryPage,
    evaluate,
    evaluate_sync,
    rollout,
    rollout_sync,
)
from agent_loop.config import Config, load_config
from agent_loop.rollout.rows import load_rows

__all__ = [
    "Config",
    "Rollout",
    "Trainer",
    "TrajectoryPage",
    "evaluate",
    "evaluate_sync",
    "load_config",
    "load_rows",
    "rollout",
    "rollout_sync",
]

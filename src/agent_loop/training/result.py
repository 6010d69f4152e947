"""Result of a training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agent_loop.training.evaluation import Evaluation


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Result of a run."""

    step: int
    """Completed steps, including those before a resume."""
    is_interrupted: bool
    """The run was stopped before `trainer.total_steps`."""
    run_dir: Path
    checkpoint: Path | None
    """The last checkpoint; None if none was written."""
    metrics: Mapping[str, float]
    """Metrics of the last step of this run."""
    evaluation: Evaluation | None
    """Last evaluation of this run."""

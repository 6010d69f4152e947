"""Settings of the data."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from agent_loop.config.sampler import SamplerConfig
from agent_loop.config.values import Positive, Section, Seed


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Sources = Annotated[list[str], BeforeValidator(_listed)]
"""Sources of rows. A single one needs no list."""


class DataConfig(Section):
    """Sources and order of the rows."""

    train_files: Sources = []
    """`.jsonl`, `.json`, `.csv`, `.parquet` or `.arrow` files; globs or folders of such files; folders saved by
    `datasets` (`folder:split`); folders of tasks in Harbor's form; names of tasks
    (`suite:task?option=value`); or `file.py:function` that returns rows."""
    val_files: Sources = []
    """Sources of the rows for evaluation, as in `train_files`."""
    prompt_key: str = "prompt"
    """Column with the messages, or with the text of one user message."""
    workspace: dict[str, Any] = {}
    """Settings that are merged over the column `workspace` of every row, such as `{container: {runtime: docker}}`. Rows
    without the column get these settings alone."""
    train_batch_size: Positive = 16
    """Prompts per step. Each prompt is sampled `rollout.n` times."""
    val_max_rows: Positive | None = None
    """Number of rows to evaluate on, from the first on; None evaluates on all rows."""
    shuffle: bool = True
    seed: Seed = 0
    sampler: SamplerConfig = SamplerConfig()
    """Selection of the rows of each step."""
    allow_changed_rows: bool = False
    """Resume a training even if its training rows have changed since the checkpoint."""

"""Settings of the data, and of the selection of rows."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from agent_loop.config.values import Name, Positive, Section, Seed, Share


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Sources = Annotated[list[str], BeforeValidator(_listed)]
"""Sources of rows. A single one needs no list."""


class SamplerConfig(Section):
    """Selection of the rows of each step. A name alone, as in `data.sampler=curriculum`, sets `name`."""

    name: Name = "uniform"
    """`uniform`, `curriculum`, a name registered with `@row_sampler`, `file.py:name` or `module:name`."""
    floor: Share = 0.1
    """Weight in `curriculum` of rows that are always or never solved; the largest weight is 1."""
    smoothing: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Weight of the newest result in the estimate of a row's success."""
    success: Literal["threshold", "reward"] = "threshold"
    """Success of a row: the share of its rollouts with at least `reward.success_threshold`, or their mean reward."""
    skip_solved: Positive | None = None
    """Skip rows whose rollouts were all successes this many times in a row."""
    skip_failed: Positive | None = None
    """Skip rows whose rollouts were all failures this many times in a row."""
    skip_for: Positive | None = None
    """Number of steps for which a row is skipped; None is the rest of the run."""
    replay_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the groups of a step that are groups of earlier steps, trained once more."""
    replay_max_age: Positive = 4
    """Maximum age of a replayed token in weight versions; with `trainer.mode=async`, at least `2 *
    trainer.max_staleness + 1`."""

    @model_validator(mode="before")
    @classmethod
    def _accept_name(cls, values: Any) -> Any:
        return {"name": values} if isinstance(values, str) else values


class DataConfig(Section):
    """Sources and order of the rows."""

    train_files: Sources = []
    """Files, globs, folders, names of tasks (`suite:task?option=value`) or `file.py:function`. A single source needs no
    list."""
    val_files: Sources = []
    """Sources of the rows for evaluation, as in `train_files`."""
    prompt_key: str = "prompt"
    """Column with the messages, or with the text of one user message."""
    workspace: dict[str, Any] = {}
    """Settings that are merged over the column `workspace` of every row."""
    train_batch_size: Positive = 16
    """Prompts per step, each sampled `rollout.n` times."""
    val_max_rows: Positive | None = None
    """Number of rows to evaluate on, from the first on; None is all."""
    shuffle: bool = True
    seed: Seed = 0
    sampler: SamplerConfig = SamplerConfig()
    """Selection of the rows of each step."""
    allow_changed_rows: bool = False
    """Resume a training even if its training rows have changed since the checkpoint."""

"""Settings of the selection of rows."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from agent_loop.config.values import Name, Positive, Section, Share


class SamplerConfig(Section):
    """Selection of the rows of each step. A name alone, as in `data.sampler=curriculum`, sets `name`."""

    name: Name = "uniform"
    """`uniform`: every row once per epoch. `curriculum`: rows that the model solves sometimes come more often. Or a
    name registered with `@row_sampler`, `file.py:name` or `module:name`."""
    floor: Share = 0.1
    """Weight in `curriculum` of rows that are always or never solved; a row that is solved half of the time, or was
    never run, has weight 1."""
    smoothing: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Weight of the newest result in the estimate of a row's success; 1 forgets all earlier results."""
    success: Literal["threshold", "reward"] = "threshold"
    """Success of a row: the share of its rollouts with at least `reward.success_threshold`, or their mean reward,
    limited to 0 to 1."""
    skip_solved: Positive | None = None
    """Skip rows whose rollouts were all successes this many times in a row; None skips none."""
    skip_failed: Positive | None = None
    """Skip rows whose rollouts were all failures this many times in a row; None skips none."""
    skip_for: Positive | None = None
    """Number of steps for which a row is skipped before it may come again; None skips it to the end of the run."""
    replay_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the groups of a step that are groups of earlier steps, trained once more, as far as there are any.
    Groups without variance are not replayed."""
    replay_max_age: Positive = 4
    """Maximum age of a replayed token in weight versions. With `trainer.mode=async`, at least
    `2 * trainer.max_staleness + 1`, the age of the newest group that can be replayed."""

    @model_validator(mode="before")
    @classmethod
    def _accept_name(cls, values: Any) -> Any:
        return {"name": values} if isinstance(values, str) else values

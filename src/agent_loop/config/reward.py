"""Settings of the reward."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from agent_loop.config.values import PositiveSeconds, Section
from agent_loop.errors import ConfigError


def _check_name(name: str) -> str:
    if name in ("reward", "score"):
        raise ValueError("the name is that of the whole reward; choose another")
    return name


PartName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$"), AfterValidator(_check_name)]
"""Name of a part of a reward. It names a metric and a stored column too."""


class RewardPart(Section):
    """One of several reward functions."""

    function: str
    """Reward function, as in `reward.function`."""
    weight: float = 1.0
    """Factor of its reward in the sum. It may be negative. With 0, the part is only recorded."""
    batch: bool = False
    """Call the function once for all trajectories of a row. Needs `reward.batch`."""


class RewardConfig(Section):
    """Scoring of trajectories."""

    function: str | None = None
    """`file.py:name` or `module:name` of `(output, row) -> float | dict`, sync or async; or a YAML file of judges."""
    functions: dict[PartName, RewardPart] = Field(default={})
    """Several reward functions by name, each with `function`, `weight` (1.0) and `batch` (false). The reward is their
    weighted sum."""
    batch: bool = False
    """Call `function` as `(outputs, rows) -> list of float | dict`, once for all trajectories of a row."""
    timeout_s: PositiveSeconds = 60.0
    """Time limit for one call of `function`, but not of judges."""
    success_threshold: float = 1.0
    """Least reward of a trajectory that counts as a success."""

    @model_validator(mode="after")
    def _is_consistent(self) -> RewardConfig:
        if self.function is not None and self.functions:
            raise ConfigError(
                "reward.function and reward.functions are both set; move the function into reward.functions"
            )
        grouped = [name for name, part in self.functions.items() if part.batch]
        if grouped and not self.batch:
            raise ConfigError(
                f"reward.functions.{grouped[0]}.batch is true and reward.batch is false; set reward.batch=true"
            )
        return self

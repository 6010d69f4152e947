"""Settings of the reward."""

from __future__ import annotations

from agent_loop.config.values import PositiveSeconds, Section


class RewardConfig(Section):
    """Scoring of trajectories."""

    function: str | None = None
    """`file.py:name` or `module:name` of `(output, row) -> float | dict`, sync or async."""
    batch: bool = False
    """Call `function` as `(outputs, rows) -> list of float | dict`, once for all trajectories of a row."""
    timeout_s: PositiveSeconds = 60.0
    """Time limit for one call of `function`."""
    success_threshold: float = 1.0
    """Least reward of a trajectory that counts as a success."""

"""Results of the rows of a run so far. N rows of the data set."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agent_loop.config import SamplerConfig
from agent_loop.trajectory import Trajectory, group_branches, mean_reward, without_lost


class RowResult(NamedTuple):
    """Result of the rollouts of a row in one step."""

    row: int
    """Index in the data set."""
    num_scored: int
    """Number of scored rollouts; at least 1."""
    num_successes: int
    """Number of rollouts with a branch whose reward is at least `reward.success_threshold`."""
    mean_reward: float
    """Mean reward of the scored rollouts."""


def row_results(
    trajectories: Sequence[Trajectory], *, rows: Sequence[int], success_threshold: float
) -> list[RowResult]:
    """Return the result of each group with a scored rollout, ordered by group.

    Args:
        trajectories: Trajectories of one rollout.
        rows: Index in the data set of the row of each group.
        success_threshold: Reward from which a rollout is a success.
    """
    groups: defaultdict[int, list[tuple[bool, float]]] = defaultdict(list)
    for branches in group_branches(without_lost(trajectories)):
        reward = mean_reward(branches)
        if reward is not None:
            is_success = any(t.reward is not None and t.reward >= success_threshold for t in branches)
            groups[branches[0].group].append((is_success, reward))
    return [
        RowResult(
            rows[group],
            len(rollouts),
            sum(is_success for is_success, _ in rollouts),
            sum(reward for _, reward in rollouts) / len(rollouts),
        )
        for group, rollouts in sorted(groups.items())
    ]


class RowHistory:
    """Success, streaks and last step of each row.

    Args:
        num_rows: N.
        config: How to measure success, and which rows to skip.
    """

    def __init__(self, num_rows: int, *, config: SamplerConfig) -> None:
        self._config = config
        self.num_results_N: NDArray[np.int32] = np.zeros(num_rows, np.int32)
        """Number of results of each row."""
        self.success_N: NDArray[np.float64] = np.full(num_rows, np.nan)
        """Estimated success of each row, from 0 to 1: an exponential moving average; NaN without a result."""
        self.solved_streak_N: NDArray[np.int32] = np.zeros(num_rows, np.int32)
        """Number of consecutive results, up to the last, in which every rollout was a success."""
        self.failed_streak_N: NDArray[np.int32] = np.zeros(num_rows, np.int32)
        """Number of consecutive results, up to the last, in which every rollout was a failure."""
        self.last_step_N: NDArray[np.int32] = np.zeros(num_rows, np.int32)
        """Step of the last result of each row; 0 without a result."""

    def observe(self, step: int, results: Iterable[RowResult]) -> None:
        """Add the results of a step."""
        for result in results:
            row, share = result.row, result.num_successes / result.num_scored
            success = share if self._config.success == "threshold" else min(max(result.mean_reward, 0.0), 1.0)
            if self.num_results_N[row]:
                success = self.success_N[row] + self._config.smoothing * (success - self.success_N[row])
            self.success_N[row] = success
            self.solved_streak_N[row] = self.solved_streak_N[row] + 1 if share == 1 else 0
            self.failed_streak_N[row] = self.failed_streak_N[row] + 1 if share == 0 else 0
            self.num_results_N[row] += 1
            self.last_step_N[row] = step

    def skipped_by(self, step: int) -> dict[str, NDArray[np.bool_]]:
        """Return which rows a step skips, [N], by the name of the setting."""
        config = self._config
        is_recent_N = self.last_step_N > (0 if config.skip_for is None else step - 1 - config.skip_for)
        streaks = {
            "skip_solved": (self.solved_streak_N, config.skip_solved),
            "skip_failed": (self.failed_streak_N, config.skip_failed),
        }
        return {
            name: (streak_N >= limit) & is_recent_N
            for name, (streak_N, limit) in streaks.items()
            if limit is not None
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the arrays by name."""
        return {name: getattr(self, name) for name in _ARRAYS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the arrays that `state_dict` returned for as many rows."""
        for name in _ARRAYS:
            getattr(self, name)[:] = state[name]


_ARRAYS = ("num_results_N", "success_N", "solved_streak_N", "failed_streak_N", "last_step_N")

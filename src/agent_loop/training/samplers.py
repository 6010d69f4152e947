"""Samplers of rows: functions that order the rows of a step by the results so far. N rows of the data set."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agent_loop.config import DataConfig, SamplerConfig
from agent_loop.errors import AlgorithmError
from agent_loop.registries import RegisteredFunction
from agent_loop.rollout.rows import RowSampler
from agent_loop.runtime.describe import describe_value
from agent_loop.training.registry import SAMPLERS, call, row_sampler
from agent_loop.trajectory import Trajectory, group_branches, mean_reward, without_lost
from agent_loop.types import Row


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
    """Return the result of each group with a scored rollout, ordered by group."""
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
    """Success, streaks and last step of each row."""

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


_CURRICULUM = 2
"""Part of the seed that separates the draws of `curriculum` from other draws with the same seed."""


@dataclass(frozen=True, slots=True)
class SamplerContext:
    """Inputs of a sampler."""

    rows: Sequence[Row]
    history: RowHistory
    """Results of the steps that the selection may depend on."""
    batch_size: int
    """Number of rows that a step takes, without those that replace others."""
    config: DataConfig


@row_sampler("uniform")
def uniform(step: int, *, count: int, context: SamplerContext) -> Sequence[int]:
    """Return the rows of a step, every row once per epoch, then the other rows in random order.

    The result depends on the step alone.
    """
    config, batch_size = context.config, context.batch_size
    order = RowSampler(
        range(len(context.rows)), batch_size=batch_size, shuffle=config.shuffle, seed=config.seed
    )
    return [*order.batch(step), *order.others(step, skip=0, count=count - batch_size)][:count]


@row_sampler("curriculum")
def curriculum(step: int, *, count: int, context: SamplerContext) -> Sequence[int]:
    """Return rows in random order, the first drawn with a probability in proportion to its `curriculum_weights`.

    Each further row is drawn in the same way among the rest (Efraimidis and Spirakis 2006, weighted random sampling
    with a reservoir).
    """
    weights_N = curriculum_weights(context.history, floor=context.config.sampler.floor)
    random = np.random.default_rng([context.config.seed, step, _CURRICULUM])
    with np.errstate(divide="ignore"):
        keys_N = random.exponential(size=len(weights_N)) / weights_N
    return np.argsort(keys_N, kind="stable")[:count].tolist()


def curriculum_weights(history: RowHistory, *, floor: float) -> NDArray[np.float64]:
    """Return the weight of each row, [N]: `floor + (1 - floor) * 4 * p * (1 - p)` for the estimated success p.

    `p * (1 - p)` is the variance of a success, the learnability of a row (arXiv 2408.15099; for language models arXiv
    2502.12272). Rows without a result have weight 1.
    """
    success_N = np.where(np.isnan(history.success_N), 0.5, history.success_N)
    return floor + (1 - floor) * 4 * success_N * (1 - success_N)


@dataclass(frozen=True, slots=True)
class LoadedSampler:
    """Sampler of a run, and the state that it keeps, if it is an object with such methods."""

    registered: RegisteredFunction

    @property
    def name(self) -> str:
        return self.registered.name

    def order(self, step: int, *, count: int, context: SamplerContext) -> list[int]:
        """Return the rows that the sampler selects, as indices in the data set."""
        result = call(self.registered, step, key=SAMPLERS.key, count=count, context=context)
        num_rows = len(context.rows)
        indices: NDArray[Any] = np.asarray(result)
        if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
            raise AlgorithmError(
                f"{SAMPLERS.key}={self.name} returned {describe_value(result)}; return indices of rows, from 0 on"
            )
        if indices.size < min(count, num_rows) or (
            indices.size and not 0 <= indices.min() <= indices.max() < num_rows
        ):
            raise AlgorithmError(
                f"{SAMPLERS.key}={self.name} returned {indices.size} indices, where count is {count} and the data set "
                f"has {num_rows} rows; return at least count indices from 0 to {num_rows - 1}"
            )
        return [int(index) for index in indices[:count]]

    def call(self, method: str, *args: Any) -> Any:
        """Call `observe`, `state_dict` or `load_state_dict`; None if the sampler does not have that method."""
        function = getattr(self.registered.function, method, None)
        if function is None:
            return None
        registered = RegisteredFunction(f"{self.name}.{method}", function)
        return call(registered, *args, key=SAMPLERS.key)


def load_sampler(reference: str) -> LoadedSampler:
    """Return the sampler that `data.sampler.name` names."""
    return LoadedSampler(SAMPLERS.load(reference, example="step, *, count, context"))

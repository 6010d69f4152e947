"""Samplers of rows: functions that order the rows of a step. N rows of the data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_loop.config import DataConfig
from agent_loop.errors import AlgorithmError
from agent_loop.registries import RegisteredFunction
from agent_loop.rollout.rows import RowSampler
from agent_loop.runtime.describe import describe_value
from agent_loop.training.registry import SAMPLERS, call, row_sampler
from agent_loop.training.samplers.history import RowHistory, RowResult
from agent_loop.types import Row

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


class LoadedSampler:
    """Sampler of a run, and the state that it keeps, if it is an object with such methods."""

    def __init__(self, registered: RegisteredFunction, *, key: str) -> None:
        self.name = registered.name
        self._registered = registered
        self._key = key

    def order(self, step: int, *, count: int, context: SamplerContext) -> list[int]:
        """Return the rows that the sampler selects, as indices in the data set.

        Raises:
            AlgorithmError: The sampler raised, or its result does not fit the data set.
        """
        result = call(self._registered, step, key=self._key, count=count, context=context)
        num_rows = len(context.rows)
        indices: NDArray[Any] = np.asarray(result)
        if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
            raise AlgorithmError(
                f"{self._key}={self.name} returned {describe_value(result)}; return indices of rows, from 0 on"
            )
        if indices.size < min(count, num_rows) or (
            indices.size and not 0 <= indices.min() <= indices.max() < num_rows
        ):
            raise AlgorithmError(
                f"{self._key}={self.name} returned {indices.size} indices, where count is {count} and the data set has "
                f"{num_rows} rows; return at least count indices from 0 to {num_rows - 1}"
            )
        return [int(index) for index in indices[:count]]

    def observe(self, step: int, results: Sequence[RowResult]) -> None:
        """Pass the results of a step to the sampler, if it has a method `observe`."""
        self._call("observe", step, results)

    def state_dict(self) -> Any:
        """Return the state of the sampler; None if it has none."""
        return self._call("state_dict")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state that `state_dict` returned."""
        self._call("load_state_dict", state)

    def _call(self, method: str, *args: Any) -> Any:
        function = getattr(self._registered.function, method, None)
        if function is None:
            return None
        registered = RegisteredFunction(f"{self.name}.{method}", function)
        return call(registered, *args, key=self._key)


def load_sampler(reference: str) -> LoadedSampler:
    """Return the sampler that `data.sampler.name` names.

    Raises:
        ConfigError: The sampler does not exist, or does not take the parameters of a sampler.
    """
    return LoadedSampler(SAMPLERS.load(reference, example="step, *, count, context"), key=SAMPLERS.key)

"""Advantages of a batch whose data sources have settings of their own (`algorithm.by_data_source`). B rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from agent_loop.config import AlgorithmConfig
from agent_loop.errors import ConfigError
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training.advantages.estimate import (
    BatchAdvantages,
    Estimator,
    estimate_advantages,
    load_estimator,
)
from agent_loop.training.advantages.rewards import collect_rewards
from agent_loop.training.advantages.turns import collect_turns

SOURCE = "data_source"
"""Column with the data source of each row."""


@dataclass(frozen=True, slots=True)
class SourceEstimators:
    """Estimators of a run: its own, and those of the sources that `algorithm.by_data_source` names."""

    config: AlgorithmConfig
    of_run: Estimator
    of_source: Mapping[str, Estimator]

    def named(self, source: str | None) -> tuple[Estimator, AlgorithmConfig]:
        """Return the estimator and the settings of a source; None is that of the run."""
        if source is None:
            return self.of_run, self.config
        return self.of_source[source], self.config.of_source(source)


def load_estimators(config: AlgorithmConfig) -> SourceEstimators:
    """Return the estimators of a run.

    Raises:
        ConfigError: An estimator does not exist, or the estimators of a source and of the run do not agree in whether
            they need a critic, greedy rollouts or forks.
    """
    of_run = load_estimator(config.adv_estimator)
    of_source: dict[str, Estimator] = {}
    for source in config.by_data_source:
        name = config.of_source(source).adv_estimator
        estimator = of_source[source] = load_estimator(name)
        needs = of_run.needs, estimator.needs
        inputs = [(each.critic, each.greedy_rollouts, each.forks) for each in needs]
        if inputs[0] != inputs[1]:
            raise ConfigError(
                f"algorithm.by_data_source.{source}.adv_estimator is {name}, and algorithm.adv_estimator is "
                f"{config.adv_estimator}; choose two that both need a critic, both need greedy rollouts, both fork, or "
                "neither"
            )
    return SourceEstimators(config, of_run, of_source)


def estimate_batch(
    batch: RolloutBatch,
    *,
    estimators: SourceEstimators,
    response_length: int,
    kl_BR: Tensor | None = None,
    is_allowed_B: Tensor | None = None,
    values_BR: Tensor | None = None,
    baselines_B: Tensor | None = None,
) -> BatchAdvantages:
    """Return the advantages of a batch, with the rows of each source of its own settings estimated on their own.

    Args:
        batch: Batch that `assemble` returned.
        estimators: Estimators and settings of the run.
        response_length: Limit in tokens, for the length penalty.
        kl_BR: Estimate of each token's KL divergence from the reference; None is no penalty.
        is_allowed_B: See `estimate_advantages`, as for the arguments below.
        values_BR: Values that the critic predicts.
        baselines_B: Rewards of greedy rollouts.

    Raises:
        AlgorithmError: An estimator raised, or did not return advantages.
        DataError: The batch lacks parts of rewards that a setting names.
    """
    found: list[tuple[Tensor, BatchAdvantages]] = []
    for source, rows_N in _rows_by_source(batch, set(estimators.of_source)).items():
        estimator, config = estimators.named(source)
        is_whole = len(rows_N) == len(batch)
        part = batch if is_whole else cast(Any, batch)[rows_N]
        kl_NR, *inputs = (
            None if each is None else each[rows_N] for each in (kl_BR, is_allowed_B, values_BR, baselines_B)
        )
        rewards = collect_rewards(part, config=config, response_length=response_length, kl_BR=kl_NR)
        turns = collect_turns(part, state_key=config.anchor_state) if estimator.needs.turns else None
        is_allowed_N, values_NR, baselines_N = inputs
        estimate = estimate_advantages(
            rewards,
            config=config,
            estimator=estimator,
            is_allowed_B=is_allowed_N,
            values_BR=values_NR,
            baselines_B=baselines_N,
            turns=turns,
        )
        found.append((rows_N, estimate))
    if len(found) == 1:
        return found[0][1]
    return BatchAdvantages(
        advantages_BR=_joined([(rows_N, each.advantages_BR) for rows_N, each in found]),
        has_signal_B=_joined([(rows_N, each.has_signal_B) for rows_N, each in found]),
        keep_B=_joined([(rows_N, each.keep_B) for rows_N, each in found]),
        returns_BR=None
        if values_BR is None
        else _joined([(rows_N, cast(Tensor, each.returns_BR)) for rows_N, each in found]),
    )


def _rows_by_source(batch: RolloutBatch, named: set[str]) -> dict[str | None, Tensor]:
    """Return the rows of each named source; those of all other rows are under None."""
    columns = set[str](cast(Any, batch).keys())
    sources: list[Any] = list(batch[SOURCE]) if named and SOURCE in columns else [None] * len(batch)
    rows: dict[str | None, list[int]] = {}
    for row, source in enumerate(sources):
        rows.setdefault(source if isinstance(source, str) and source in named else None, []).append(row)
    rows = rows or {None: []}
    return {source: torch.tensor(found, dtype=torch.int64) for source, found in rows.items()}


def _joined(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the values of all rows, [B, ...], from those of some rows each."""
    first = parts[0][1]
    whole = first.new_zeros(sum(len(rows_N) for rows_N, _ in parts), *first.shape[1:])
    for rows_N, values_N in parts:
        whole[rows_N] = values_N
    return whole

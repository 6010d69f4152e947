"""Advantages of a batch, by the estimators that the run and its data sources name. B rows, R response tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from agent_loop.config import AlgorithmConfig, Config
from agent_loop.errors import AlgorithmError, ConfigError
from agent_loop.registries import RegisteredFunction
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training.advantages.estimators import Advantages
from agent_loop.training.advantages.groups import has_signal, share_weights
from agent_loop.training.advantages.rewards import Rewards, collect_rewards
from agent_loop.training.advantages.turns import Turns, collect_turns, whiten
from agent_loop.training.registry import ESTIMATORS, EstimatorNeeds, call, check_shape

SOURCE = "data_source"
"""Column with the data source of each row."""


@dataclass(frozen=True, slots=True)
class BatchAdvantages:
    """Advantages of a batch, and the rows to train on."""

    advantages_BR: Tensor
    """float32; values count at sampled tokens of rows that are kept."""
    has_signal_B: Tensor
    """Bool: rows that the estimator can learn from."""
    keep_B: Tensor
    """Bool: rows to train on."""
    returns_BR: Tensor | None = None
    """Returns that the critic is trained to predict, float32; None without a critic."""


@dataclass(frozen=True, slots=True)
class Estimator:
    """Advantage estimator and its settings."""

    registered: RegisteredFunction
    needs: EstimatorNeeds
    config: AlgorithmConfig


Estimators: TypeAlias = Mapping[str | None, Estimator]
"""Estimators by the data source that `algorithm.by_data_source` names; that of all other rows is under None."""


def estimator_needs(reference: str) -> EstimatorNeeds:
    """Return the needs of the estimator that `algorithm.adv_estimator` names."""
    return ESTIMATORS.options_of(reference) or EstimatorNeeds()


def load_estimator(config: AlgorithmConfig) -> Estimator:
    """Return the estimator that `algorithm.adv_estimator` names."""
    needs = estimator_needs(config.adv_estimator)
    example = ", ".join(["rewards, *, config", *_inputs_of(needs)])
    return Estimator(ESTIMATORS.load(config.adv_estimator, example=example), needs, config)


def load_estimators(config: AlgorithmConfig) -> Estimators:
    """Return the estimators of a run."""
    of_run = load_estimator(config)
    estimators: dict[str | None, Estimator] = {None: of_run}
    for source in config.by_data_source:
        estimator = estimators[source] = load_estimator(config.of_source(source))
        needs = of_run.needs, estimator.needs
        inputs = [(each.critic, each.greedy_rollouts, each.forks) for each in needs]
        if inputs[0] != inputs[1]:
            raise ConfigError(
                f"algorithm.by_data_source.{source}.adv_estimator is {estimator.registered.name}, and "
                f"algorithm.adv_estimator is {config.adv_estimator}; choose two that both need a critic, both need "
                "greedy rollouts, both fork, or neither"
            )
    return estimators


def check_groups(config: Config) -> None:
    """Raise an error if an estimator compares the trajectories of a prompt and `rollout.n` is 1, or does not exist."""
    for source, estimator in load_estimators(config.algorithm).items():
        if estimator.needs.groups and config.rollout.n < 2:
            key = "" if source is None else f"by_data_source.{source}."
            raise ConfigError(
                f"rollout.n is {config.rollout.n}, but algorithm.{key}adv_estimator={estimator.registered.name} "
                "compares the trajectories of one prompt; give at least 2"
            )


def estimate_batch(
    batch: RolloutBatch,
    *,
    estimators: Estimators,
    response_length: int,
    kl_BR: Tensor | None = None,
    is_allowed_B: Tensor | None = None,
    values_BR: Tensor | None = None,
    baselines_B: Tensor | None = None,
) -> BatchAdvantages:
    """Return the advantages of a batch. The rows of each source with settings of its own are estimated on their own.

    `kl_BR` estimates each token's KL divergence from the reference. Rows outside of `is_allowed_B` are not trained, and
    still count in their groups. `baselines_B` are the rewards of greedy rollouts, NaN if they were not scored.
    """
    parts = list(_rows_by_source(batch, estimators).items())
    found: list[BatchAdvantages] = []
    for source, rows_N in parts:
        estimator = estimators[source]
        part = batch if len(parts) == 1 else cast(Any, batch)[rows_N]
        kl_NR, is_allowed_N, values_NR, baselines_N = (
            None if each is None else each[rows_N] for each in (kl_BR, is_allowed_B, values_BR, baselines_B)
        )
        config = estimator.config
        rewards = collect_rewards(part, config=config, response_length=response_length, kl_BR=kl_NR)
        turns = collect_turns(part, state_key=config.anchor_state) if estimator.needs.turns else None
        found.append(
            estimate_advantages(
                rewards,
                estimator=estimator,
                is_allowed_B=is_allowed_N,
                values_BR=values_NR,
                baselines_B=baselines_N,
                turns=turns,
            )
        )
    order_B = torch.cat([rows_N for _, rows_N in parts]).argsort()
    columns: dict[str, Any] = {}
    for column in fields(BatchAdvantages):
        values = [getattr(each, column.name) for each in found]
        columns[column.name] = None if any(each is None for each in values) else torch.cat(values)[order_B]
    return BatchAdvantages(**columns)


def _rows_by_source(batch: RolloutBatch, estimators: Estimators) -> dict[str | None, Tensor]:
    """Return the rows of each estimator that has any; those of the run's if the batch is empty."""
    has_sources = len(estimators) > 1 and SOURCE in set[str](cast(Any, batch).keys())
    sources: list[Any] = list(batch[SOURCE]) if has_sources else [None] * len(batch)
    rows: dict[str | None, list[int]] = {}
    for row, source in enumerate(sources):
        named = source if isinstance(source, str) and source in estimators else None
        rows.setdefault(named, []).append(row)
    return {source: torch.tensor(found, dtype=torch.int64) for source, found in (rows or {None: []}).items()}


def estimate_advantages(
    rewards: Rewards,
    *,
    estimator: Estimator,
    is_allowed_B: Tensor | None = None,
    values_BR: Tensor | None = None,
    baselines_B: Tensor | None = None,
    turns: Turns | None = None,
) -> BatchAdvantages:
    """Return the advantages of rows that share an estimator; the arguments are those of `estimate_batch`."""
    config, needs = estimator.config, estimator.needs
    given: dict[str, Any] = {"values_BR": values_BR, "baselines_B": baselines_B, "turns": turns}
    result = _call(estimator, rewards, **{name: given[name] for name in _inputs_of(needs)})
    signal_B = result.has_signal_B
    if signal_B is None and needs.groups:
        signal_B = has_signal(rewards.per_row(), groups_B=rewards.groups_B, rollouts_B=rewards.rollouts_B)
    elif signal_B is None:
        signal_B = rewards.is_scored_B
    keep_B = rewards.is_scored_B if is_allowed_B is None else rewards.is_scored_B & is_allowed_B
    if config.drop_zero_variance_groups or not needs.groups:
        keep_B = keep_B & signal_B
    advantages_BR = result.advantages
    if advantages_BR.dim() == 1:
        advantages_BR = advantages_BR[:, None].expand(rewards.mask_BR.shape)
    is_trained_BR = rewards.mask_BR.bool() & keep_B[:, None]
    inputs = [rewards.penalties_BR] if values_BR is None else [rewards.penalties_BR, values_BR]
    is_bad_BR = is_trained_BR & ~advantages_BR.isfinite()
    if is_bad_BR.any() and all(bool(values.isfinite().all()) for values in inputs):
        row, token = map(int, is_bad_BR.nonzero()[0])
        raise AlgorithmError(
            f"{_where(estimator)} {float(advantages_BR[row, token])} as the advantage of row {row}, token {token}, and "
            f"of {int(is_bad_BR.sum()) - 1} more trained tokens; return finite values at trained tokens"
        )
    advantages_BR = torch.where(is_trained_BR | advantages_BR.isfinite(), advantages_BR, 0.0)
    if result.whiten:
        is_trained_B = is_trained_BR.any(dim=1)
        weights_B = share_weights(is_trained_B, groups_B=rewards.prompts_B, rollouts_B=rewards.rollouts_B)
        advantages_BR = whiten(advantages_BR, mask_BR=is_trained_BR, weights_B=weights_B)
    return BatchAdvantages(
        advantages_BR=advantages_BR.float(),
        has_signal_B=signal_B,
        keep_B=keep_B,
        returns_BR=result.returns_BR,
    )


def _inputs_of(needs: EstimatorNeeds) -> list[str]:
    """Return the arguments of an estimator beside the rewards and the settings."""
    inputs = {"values_BR": needs.critic, "baselines_B": needs.greedy_rollouts, "turns": needs.turns}
    return [name for name, is_needed in inputs.items() if is_needed]


@torch.no_grad()
def _call(estimator: Estimator, rewards: Rewards, **inputs: Any) -> Advantages:
    """Call the estimator and check the shapes of its result."""
    returned = call(estimator.registered, rewards, key=ESTIMATORS.key, config=estimator.config, **inputs)
    result = returned if isinstance(returned, Advantages) else Advantages(returned)
    num_rows, num_tokens = rewards.mask_BR.shape
    by_row, by_token = [num_rows], [num_rows, num_tokens]
    where = _where(estimator)
    check_shape(result.advantages, [by_row, by_token], what="advantages", where=where)
    if result.has_signal_B is not None:
        check_shape(result.has_signal_B, [by_row], what="has_signal_B", where=where)
    if result.returns_BR is not None:
        check_shape(result.returns_BR, [by_token], what="returns_BR", where=where)
    elif estimator.needs.critic:
        raise AlgorithmError(f"{where} no returns_BR for the critic; return Advantages(..., returns_BR=...)")
    return result


def _where(estimator: Estimator) -> str:
    return f"{ESTIMATORS.key}={estimator.registered.name} returned"

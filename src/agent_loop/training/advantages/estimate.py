"""Advantages of a batch, by the estimators that the run and its data sources name. B rows, R response tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from agent_loop.config import AlgorithmConfig, Config
from agent_loop.errors import AlgorithmError, ConfigError
from agent_loop.registries import RegisteredFunction
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.runtime.describe import describe_value
from agent_loop.training.advantages.estimators import Advantages
from agent_loop.training.advantages.groups import has_signal, share_weights
from agent_loop.training.advantages.rewards import Rewards, collect_rewards
from agent_loop.training.advantages.turns import Turns, collect_turns, whiten
from agent_loop.training.registry import ESTIMATORS, EstimatorNeeds, call


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
    """Advantage estimator of a run."""

    registered: RegisteredFunction
    needs: EstimatorNeeds = field(default=EstimatorNeeds())


def estimator_needs(reference: str) -> EstimatorNeeds:
    """Return the needs of the estimator that `algorithm.adv_estimator` names."""
    return ESTIMATORS.options_of(reference) or EstimatorNeeds()


def load_estimator(reference: str) -> Estimator:
    """Return the estimator that `algorithm.adv_estimator` names."""
    needs = estimator_needs(reference)
    example = "rewards, *, config"
    example += ", values_BR" if needs.critic else ""
    example += ", baselines_B" if needs.greedy_rollouts else ""
    example += ", turns" if needs.turns else ""
    return Estimator(ESTIMATORS.load(reference, example=example), needs)


def estimate_advantages(
    rewards: Rewards,
    *,
    config: AlgorithmConfig,
    estimator: Estimator | None = None,
    is_allowed_B: Tensor | None = None,
    values_BR: Tensor | None = None,
    baselines_B: Tensor | None = None,
    turns: Turns | None = None,
) -> BatchAdvantages:
    """Return the advantages of a batch.

    Args:
        rewards: Rewards of the batch.
        config: Settings of the estimator.
        estimator: The estimator; None loads the one that `config.adv_estimator` names.
        is_allowed_B: Bool: rows that may be trained; None is all. The others still count in their groups.
        values_BR: Values that the critic predicts before each token; `gae` needs them.
        baselines_B: Reward of a greedy rollout of the same prompt, NaN if it was not scored; `remax` needs it.
        turns: Turns of the rows; `turn_grpo` and `gigpo` need them.

    Raises:
        ValueError: The estimator needs values, baselines or turns, and they are None.
        AlgorithmError: The estimator raised, or did not return advantages.
    """
    estimator = estimator or load_estimator(config.adv_estimator)
    result = _call(
        estimator, rewards, config=config, values_BR=values_BR, baselines_B=baselines_B, turns=turns
    )
    signal_B = result.has_signal_B
    if signal_B is None:
        signal_B = _default_signal(rewards, compares_in_group=estimator.needs.groups)
    keep_B = rewards.is_scored_B if is_allowed_B is None else rewards.is_scored_B & is_allowed_B
    if config.drop_zero_variance_groups or not estimator.needs.groups:
        keep_B = keep_B & signal_B
    advantages_BR = result.advantages
    if advantages_BR.dim() == 1:
        advantages_BR = advantages_BR[:, None].expand(rewards.mask_BR.shape)
    is_trained_BR = rewards.mask_BR.bool() & keep_B[:, None]
    inputs = [rewards.penalties_BR] if values_BR is None else [rewards.penalties_BR, values_BR]
    if all(bool(values.isfinite().all()) for values in inputs):  # else the estimator is not at fault
        _check_finite(advantages_BR, is_trained_BR, where=_where(estimator))
    advantages_BR = torch.where(is_trained_BR | advantages_BR.isfinite(), advantages_BR, 0.0)
    if result.whiten:
        prompts_B = rewards.groups_B if rewards.prompts_B is None else rewards.prompts_B
        is_trained_B = is_trained_BR.any(dim=1)
        weights_B = share_weights(is_trained_B, groups_B=prompts_B, rollouts_B=rewards.rollouts_B)
        advantages_BR = whiten(advantages_BR, mask_BR=is_trained_BR, weights_B=weights_B)
    return BatchAdvantages(
        advantages_BR=advantages_BR.float(),
        has_signal_B=signal_B,
        keep_B=keep_B,
        returns_BR=result.returns_BR,
    )


@torch.no_grad()
def _call(
    estimator: Estimator,
    rewards: Rewards,
    *,
    config: AlgorithmConfig,
    values_BR: Tensor | None,
    baselines_B: Tensor | None,
    turns: Turns | None,
) -> Advantages:
    """Call the estimator and check the shapes of its result."""
    name, inputs = estimator.registered.name, dict[str, Any](config=config)
    if estimator.needs.critic:
        if values_BR is None:
            raise ValueError(f"adv_estimator is {name}, which needs values_BR; give the values of a critic")
        inputs["values_BR"] = values_BR
    if estimator.needs.greedy_rollouts:
        if baselines_B is None:
            raise ValueError(
                f"adv_estimator is {name}, which needs baselines_B; give the rewards of greedy rollouts"
            )
        inputs["baselines_B"] = baselines_B
    if estimator.needs.turns:
        if turns is None:
            raise ValueError(f"adv_estimator is {name}, which needs turns; give those of the batch")
        inputs["turns"] = turns
    returned = call(estimator.registered, rewards, key=ESTIMATORS.key, **inputs)
    result = returned if isinstance(returned, Advantages) else Advantages(returned)
    num_rows, num_tokens = rewards.mask_BR.shape
    by_row, by_token = [num_rows], [num_rows, num_tokens]
    where = _where(estimator)
    _check_shape(result.advantages, [by_row, by_token], what="advantages", where=where)
    if result.has_signal_B is not None:
        _check_shape(result.has_signal_B, [by_row], what="has_signal_B", where=where)
    if result.returns_BR is not None:
        _check_shape(result.returns_BR, [by_token], what="returns_BR", where=where)
    elif estimator.needs.critic:
        raise AlgorithmError(f"{where} no returns_BR for the critic; return Advantages(..., returns_BR=...)")
    return result


def _where(estimator: Estimator) -> str:
    return f"{ESTIMATORS.key}={estimator.registered.name} returned"


def _check_shape(value: Any, shapes: list[list[int]], *, what: str, where: str) -> None:
    expected = " or ".join(map(str, shapes))
    if not isinstance(value, Tensor):
        raise AlgorithmError(
            f"{where} {describe_value(value)} as {what}; return a tensor of shape {expected}"
        )
    if list(value.shape) not in shapes:
        raise AlgorithmError(
            f"{where} {what} of shape {list(value.shape)}; return a tensor of shape {expected}"
        )


def _check_finite(advantages_BR: Tensor, is_trained_BR: Tensor, *, where: str) -> None:
    is_bad_BR = is_trained_BR & ~advantages_BR.isfinite()
    if is_bad_BR.any():
        row, token = map(int, is_bad_BR.nonzero()[0])
        raise AlgorithmError(
            f"{where} {float(advantages_BR[row, token])} as the advantage of row {row}, token {token}, and of "
            f"{int(is_bad_BR.sum()) - 1} more trained tokens; return finite values at trained tokens"
        )


def _default_signal(rewards: Rewards, *, compares_in_group: bool) -> Tensor:
    if not compares_in_group:
        return rewards.is_scored_B
    return has_signal(rewards.per_row(), groups_B=rewards.groups_B, rollouts_B=rewards.rollouts_B)


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
    """Return the estimators of a run."""
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


def check_groups(config: Config) -> None:
    """Raise an error if an estimator compares the trajectories of a prompt and `rollout.n` is 1, or does not exist."""
    estimators = load_estimators(config.algorithm)
    by_key = {"": estimators.of_run} | {
        f"by_data_source.{s}.": each for s, each in estimators.of_source.items()
    }
    for key, estimator in by_key.items():
        if estimator.needs.groups and config.rollout.n < 2:
            raise ConfigError(
                f"rollout.n is {config.rollout.n}, but algorithm.{key}adv_estimator={estimator.registered.name} "
                "compares the trajectories of one prompt; give at least 2"
            )


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
    """Return the advantages of a batch, with the rows of each source of its own settings estimated on their own."""
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

"""Metrics by data source and by turn. B rows of a batch, R response width, P parts, N tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training import metrics as names
from agent_loop.training.advantages.sources import SOURCE
from agent_loop.training.advantages.turns import turn_numbers
from agent_loop.training.learned import TOKEN_VALUES, TRAIN_LOG_PROBS
from agent_loop.training.losses import masked_difference
from agent_loop.trajectory import Trajectory, group_branches, mean_reward, without_lost

MAX_SOURCES = 20
"""Number of data sources with metrics of their own."""
MAX_TURNS = 8
"""Number of turns with metrics of their own. Later turns share one name."""

ROLLOUTS = "rollouts"
"""Number of rollouts of a data source, or of rollouts with a turn, that infrastructure did not fail."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """Division of the tokens of a batch into P parts."""

    prefixes: Sequence[str]
    """Prefix of the metrics of each part."""
    parts_BR: Tensor
    """Part of each token, int64; -1 for none."""
    has_BP: Tensor
    """Bool: rows that count in each part."""

    def means(self, values_BR: Tensor) -> dict[str, float]:
        """Return the mean of each part by its prefix, without NaN; parts without a value are absent."""
        is_known_BR = ~values_BR.isnan() & (self.parts_BR >= 0)
        parts_N, values_N, size = self.parts_BR[is_known_BR], values_BR[is_known_BR], len(self.prefixes)
        sums_P = torch.bincount(parts_N, weights=values_N.double(), minlength=size)
        counts_P = torch.bincount(parts_N, minlength=size)
        return {
            prefix: float(total / count)
            for prefix, total, count in zip(self.prefixes, sums_P, counts_P, strict=True)
            if count
        }


class Breakdowns:
    """Metrics of each data source and of each turn of a run.

    Args:
        success_threshold: Reward from which a rollout is a success.
        report: Function that shows a line to the user.
    """

    def __init__(self, *, success_threshold: float, report: Callable[[str], None]) -> None:
        self._success_threshold = success_threshold
        self._report = report
        self._sources: list[str] = []
        self._is_full = False

    def metrics(self, batch: RolloutBatch, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return the metrics of a step, by name. A run with one source, or a step with one turn, has none of that kind.

        Rewards are means over scored rollouts, and the shares of successes are over all rollouts that infrastructure
        did not fail. By turn, a rollout counts at each turn that it has. The other metrics are means over sampled
        tokens.

        Args:
            batch: Batch that `assemble` returned and `Learner.learn` annotated.
            trajectories: Trajectories of the batch.
        """
        values = _token_values(batch)
        found: dict[str, float] = {}
        for parts in (self._by_source(batch), _by_turn(batch)):
            for part, prefix in enumerate(parts.prefixes):
                chosen = [t for t, has in zip(trajectories, parts.has_BP[:, part], strict=True) if has]
                found |= {prefix + name: value for name, value in self._of_rollouts(chosen).items()}
            for name, values_BR in values.items():
                for prefix, mean in parts.means(values_BR).items():
                    found[prefix + name.removeprefix(names.ACTOR)] = mean
        return found

    def _of_rollouts(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        rollouts = group_branches(without_lost(trajectories))
        if not rollouts:
            return {}
        means = [reward for branches in rollouts if (reward := mean_reward(branches)) is not None]
        num_successes = sum(
            any(t.reward is not None and t.reward >= self._success_threshold for t in branches)
            for branches in rollouts
        )
        metrics = {ROLLOUTS: float(len(rollouts)), names.SUCCESS_SHARE: num_successes / len(rollouts)}
        return metrics | ({names.REWARD_MEAN: float(np.mean(means))} if means else {})

    def _by_source(self, batch: RolloutBatch) -> _Parts:
        sources: list[Any] = list(batch[SOURCE]) if SOURCE in set[str](cast(Any, batch).keys()) else []
        self._note(source for source in sources if isinstance(source, str))
        if len(self._sources) < 2 or not sources:
            return _no_parts(batch)
        numbers = {name: number for number, name in enumerate(self._sources)}
        parts_B = torch.tensor(
            [numbers.get(source, -1) if isinstance(source, str) else -1 for source in sources]
        )
        return _Parts(
            prefixes=[f"{names.BY_SOURCE}{name}/" for name in self._sources],
            parts_BR=parts_B[:, None].expand(batch["responses"].shape),
            has_BP=parts_B[:, None] == torch.arange(len(numbers)),
        )

    def _note(self, sources: Iterator[str]) -> None:
        for source in dict.fromkeys(sources):
            if source in self._sources:
                continue
            if len(self._sources) < MAX_SOURCES:
                self._sources.append(source)
            elif not self._is_full:
                self._is_full = True
                self._report(
                    f"the rows have more than {MAX_SOURCES} data sources, and {names.BY_SOURCE} has the first "
                    f"{MAX_SOURCES}; {source!r} and later ones have no metrics of their own"
                )


def _by_turn(batch: RolloutBatch) -> _Parts:
    numbers_BR = turn_numbers(batch)
    num_turns = int(numbers_BR.max()) + 1 if numbers_BR.numel() else 0
    if num_turns < 2:
        return _no_parts(batch)
    turns = range(min(num_turns, MAX_TURNS + 1))
    return _Parts(
        prefixes=[f"{names.BY_TURN}{turn}{'+' if turn == MAX_TURNS else ''}/" for turn in turns],
        parts_BR=numbers_BR.clamp(max=MAX_TURNS),
        has_BP=numbers_BR.amax(dim=1, keepdim=True) >= torch.tensor(turns),
    )


def _no_parts(batch: RolloutBatch) -> _Parts:
    return _Parts([], torch.full(batch["responses"].shape, -1), torch.zeros(len(batch), 0, dtype=torch.bool))


def _token_values(batch: RolloutBatch) -> dict[str, Tensor]:
    """Return values of sampled tokens by metric name, [B, R]; NaN where a token was not sampled or not trained."""
    columns = set[str](cast(Any, batch).keys())
    is_sampled_BR = batch["response_mask"].bool()
    found = {
        column.removeprefix(TOKEN_VALUES): batch[column]
        for column in sorted(columns)
        if column.startswith(TOKEN_VALUES)
    }
    if {TRAIN_LOG_PROBS, "rollout_log_probs"} <= columns:
        own_BR = batch[TRAIN_LOG_PROBS]
        difference_BR = masked_difference(own_BR, batch["rollout_log_probs"], mask_BT=is_sampled_BR)
        found[names.LOGPROB_DIFF_MEAN] = difference_BR.abs()
    return {name: torch.where(is_sampled_BR, values_BR, torch.nan) for name, values_BR in found.items()}

"""Rewards of trajectories and of their tokens, and the rows that are compared. B rows, R response tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from agent_loop.config import AlgorithmConfig
from agent_loop.config.training import OUTCOME
from agent_loop.errors import DataError
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.runtime.numeric import as_reward
from agent_loop.training.advantages.groups import compared_turns, grpo_advantages, rollouts_of_rows
from agent_loop.trajectory.branches import SEAT


def has_seats(batch: RolloutBatch) -> bool:
    """Return whether a batch has rows of games."""
    return any(isinstance(seat, int | str) for seat in _seats(batch))


def compared_groups(batch: RolloutBatch) -> Tensor:
    """Return for each row a number that it shares with the rows of its group and seat; int64 [B].

    It is the number of the group for rows without a seat.
    """
    groups_B: Tensor = batch["group"]
    if not has_seats(batch):
        return groups_B
    first, numbers, found = int(groups_B.max()) + 1, dict[tuple[int, Any], int](), list[int]()
    groups: list[int] = batch["group"].tolist()
    for group, seat in zip(groups, _seats(batch), strict=True):
        is_of_game = isinstance(seat, int | str)
        found.append(numbers.setdefault((group, seat), first + len(numbers)) if is_of_game else group)
    return torch.tensor(found, dtype=torch.int64)


def _seats(batch: RolloutBatch) -> list[Any]:
    names: set[str] = set(cast(Any, batch).keys())
    name = next((name for name in (f"extra_fields.{SEAT}", SEAT) if name in names), None)
    return [] if name is None else list(batch[name])


logger = logging.getLogger(__name__)


def part_columns(batch: RolloutBatch, names: Iterable[str]) -> dict[str, str]:
    """Return the columns of a batch that hold parts of rewards, by the name of the part.

    A part that the reward function returned goes before a field of the loop (`extra_fields`) with the same name.
    """
    fields = cast(Any, batch)
    columns = set[str](fields.keys())
    found: dict[str, str] = {}
    for name in names:
        for column in (f"reward_extra.{name}", name, f"extra_fields.{name}"):
            if name != OUTCOME and column in columns and not isinstance(fields.get(column), Tensor):
                found[name] = column
                break
    return found


def collect_parts(batch: RolloutBatch, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the parts of rewards by name, without the reward itself; [B] float64, NaN where a row has no number.

    Scored rows with a value that is not a number are reported in the log.
    """
    names = [name for name in names if name != OUTCOME]
    columns, ids = part_columns(batch, names), list(batch["trajectory_id"])
    is_scored: list[bool] = batch["is_scored"].tolist()
    if names and not columns and any(is_scored):
        raise DataError(
            f"algorithm.reward_parts names {', '.join(names)}, and no trajectory has such a value; return them from "
            "the reward function beside 'reward'"
        )
    parts: dict[str, Tensor] = {}
    for name in names:
        values: list[Any] = list(batch[columns[name]]) if name in columns else [None] * len(ids)
        numbers = [as_reward(value) for value in values]
        wrong = [
            row
            for row, number in enumerate(numbers)
            if number is None and values[row] is not None and is_scored[row]
        ]
        if wrong:
            logger.warning(
                "the reward part %r of %s is %r, and %d more rows have no finite number either; the part does not "
                "count there",
                name,
                ids[wrong[0]],
                values[wrong[0]],
                len(wrong) - 1,
            )
        found = [torch.nan if number is None else number for number in numbers]
        parts[name] = torch.tensor(found, dtype=torch.float64)
    return parts


@dataclass(frozen=True, slots=True)
class Rewards:
    """Rewards of a batch, by kind."""

    outcome_B: Tensor
    """Reward of each whole trajectory; NaN if it was not scored."""
    turns_BR: Tensor
    """Reward of each turn at its last token; 0 elsewhere."""
    has_turn_BR: Tensor
    """Bool: tokens at which a turn has a reward, even if it is 0."""
    penalties_BR: Tensor
    """Penalty that is subtracted at each token."""
    mask_BR: Tensor
    """1 for sampled tokens."""
    groups_B: Tensor
    """Number of the group of each row. In games, the seats of a group are groups of their own."""
    turn_weight: float
    """Weight of the rewards of turns."""
    rollouts_B: Tensor
    """Number of the rollout of each row."""
    prompts_B: Tensor
    """Number of the prompt of each row, which the seats of a game share."""
    shared_turns_B: Tensor
    """Sum of the rewards of turns that are trained in another branch of the rollout."""
    parts: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Parts of the reward that `algorithm.reward_parts` names, float64 [B] each; NaN if a row was not scored or has no
    number. The name `reward`, which stands for `per_row()`, is not among them."""

    @property
    def is_scored_B(self) -> Tensor:
        """Bool: rows with a reward."""
        return ~self.outcome_B.isnan()

    def per_row(self) -> Tensor:
        """Return the total reward of each row, [B]; NaN if it was not scored.

        The outcome of a row without a token to train counts too.
        """
        has_token_B = self.mask_BR.bool().any(dim=1)
        earned_B = self.per_token().sum(dim=1) + torch.where(has_token_B, 0.0, self.outcome_B.double())
        earned_B = earned_B + self.turn_weight * self.shared_turns_B
        return torch.where(self.is_scored_B, earned_B, torch.nan)

    def per_token(self) -> Tensor:
        """Return the reward of each token, [B, R] float64: turns at their ends, the outcome at the last sampled token.

        It is 0 in rows that were not scored, and at tokens that were not sampled.
        """
        places = torch.arange(self.mask_BR.shape[1])
        last_B = torch.where(self.mask_BR.bool(), places, -1).amax(dim=1, keepdim=True) if len(places) else 0
        outcome_BR = torch.where(places == last_B, self.outcome_B[:, None].double(), 0.0)
        rewards_BR = outcome_BR + self.turn_weight * self.turns_BR.double() - self.penalties_BR
        return torch.where(self.mask_BR.bool() & self.is_scored_B[:, None], rewards_BR, 0.0)

    def centred(self) -> Rewards:
        """Return the rewards minus the means of each group: the mean of its outcomes, and of its rewards of turns."""
        turns_BR = compared_turns(
            self.turns_BR,
            is_rewarded_BR=self.has_turn_BR,
            groups_B=self.groups_B,
            rollouts_B=self.rollouts_B,
            norm_by_std=False,
        )
        centred_B = grpo_advantages(
            self.outcome_B, groups_B=self.groups_B, rollouts_B=self.rollouts_B, norm_by_std=False
        )
        outcome_B = torch.where(self.is_scored_B, centred_B, torch.nan)
        return replace(self, outcome_B=outcome_B, turns_BR=turns_BR)


def collect_rewards(
    batch: RolloutBatch,
    *,
    config: AlgorithmConfig,
    response_length: int,
    kl_BR: Tensor | None = None,
) -> Rewards:
    """Return the rewards of a batch, with the penalties of the configuration.

    The reward of a turn that branches share is a reward of a token in the branch that trains the turn, and counts in
    the total reward of each of these branches. A row whose reward is not finite counts as not scored.
    `config.overlong_buffer` lies before `response_length` tokens.
    """
    mask_BR, outcome_B = batch["response_mask"], batch["reward"]
    if config.overlong_buffer is not None:
        lengths_B = batch["attention_mask"][:, batch["prompts"].shape[1] :].sum(dim=1)
        outcome_B = outcome_B - config.overlong_penalty * overlong_penalty(
            lengths_B, limit=response_length, buffer=config.overlong_buffer
        )
    outcome_B = torch.where(outcome_B.isfinite(), outcome_B, torch.nan)
    parts = collect_parts(batch, config.reward_parts)
    turns_BR, is_scored_B1 = batch["turn_rewards"], outcome_B.isfinite()[:, None]
    has_turn_BR = batch["has_turn_reward"] & turns_BR.isfinite() & mask_BR.bool() & is_scored_B1
    is_shared_BR = (batch["weight_versions"] >= 0) & ~mask_BR.bool() & turns_BR.isfinite()
    penalties_BR = torch.zeros(mask_BR.shape) if kl_BR is None else config.kl_reward_coef * kl_BR
    return Rewards(
        outcome_B=outcome_B,
        turns_BR=torch.where(has_turn_BR, turns_BR, 0.0),
        has_turn_BR=has_turn_BR,
        penalties_BR=penalties_BR,
        mask_BR=mask_BR,
        groups_B=compared_groups(batch),
        turn_weight=config.turn_reward_weight,
        rollouts_B=rollouts_of_rows(batch),
        prompts_B=batch["group"],
        shared_turns_B=torch.where(is_shared_BR, turns_BR, 0.0).double().sum(dim=1),
        parts={name: torch.where(outcome_B.isfinite(), part_B, torch.nan) for name, part_B in parts.items()},
    )


def overlong_penalty(lengths_B: Tensor, *, limit: int, buffer: int) -> Tensor:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), without its sign; float32 [B].

    It rises from 0 at `limit - buffer` tokens or less to 1 at `limit` or more.
    """
    return ((lengths_B - (limit - buffer)) / buffer).clamp(0, 1).float()

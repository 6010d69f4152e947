"""Turns and tokens as steps: their rewards, returns and states. B rows, R response tokens, T turns at most."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from agent_loop.rollout.batch import RolloutBatch
from agent_loop.rollout.forks import FORKED_TURN
from agent_loop.training.advantages.rewards import Rewards
from agent_loop.trajectory import Feedback


@dataclass(frozen=True, slots=True)
class Turns:
    """Turns of the rows of a batch."""

    numbers_BR: Tensor
    """Number of the turn of each sampled token, from 0; int64, -1 at other tokens."""
    rewards_BT: Tensor
    """Sum of the rewards of each turn, float64; 0 where there is none."""
    states_BT: Tensor
    """Number that turns with equal states share, int64; -1 where the row has no such turn."""
    forked_B: Tensor
    """First turn that a continuation does not share with the trajectory that it forks, from 0; int64, -1 in rows that
    are no continuations."""

    @property
    def is_turn_BT(self) -> Tensor:
        """Bool: turns that exist."""
        return self.states_BT >= 0

    def per_token(self, values_BT: Tensor) -> Tensor:
        """Return the value of each token's turn, [B, R]; 0 at tokens that were not sampled."""
        if not values_BT.shape[1]:
            return torch.zeros(self.numbers_BR.shape, dtype=values_BT.dtype)
        values_BR = values_BT.gather(1, self.numbers_BR.clamp(min=0))
        return torch.where(self.numbers_BR >= 0, values_BR, 0.0)


def collect_turns(batch: RolloutBatch, *, state_key: str | None = None) -> Turns:
    """Return the turns of a batch.

    The state of a turn is what the model saw last: the tokens between the turn before and this turn, with the images
    among them, or for the first turn the prompt. Equal tokens are equal states, whatever came before them. Where the
    feedback on a turn has a value under `state_key` in its `extra`, this value is the state of the next turn.
    """
    numbers_BR = turn_numbers(batch)
    is_sampled_BR = numbers_BR >= 0
    num_turns = int(numbers_BR.max()) + 1 if numbers_BR.numel() else 0
    turn_rewards_BR = batch["turn_rewards"].double()
    turn_rewards_BR = torch.where(is_sampled_BR & turn_rewards_BR.isfinite(), turn_rewards_BR, 0.0)
    states_BT = torch.full((len(numbers_BR), num_turns), -1, dtype=torch.int64)
    seen: dict[Hashable, int] = {}
    feedback_B = _column(batch, "feedback") if state_key is not None else [()] * len(numbers_BR)
    for row, states in enumerate(_observations(batch, is_sampled_BR)):
        for each in cast("tuple[Feedback, ...]", feedback_B[row] or ()):
            if each.place is not None and state_key in each.extra:
                turn = int(numbers_BR[row, each.place]) + 1
                if 0 < turn < len(states):
                    states[turn] = json.dumps(each.extra[cast(str, state_key)], sort_keys=True, default=repr)
        found = [seen.setdefault(state, len(seen)) for state in states]
        states_BT[row, : len(found)] = torch.tensor(found, dtype=torch.int64)
    return Turns(
        numbers_BR,
        rewards_BT=sum_per_turn(turn_rewards_BR, numbers_BR, num_turns=num_turns),
        states_BT=states_BT,
        forked_B=torch.tensor(
            [each if isinstance(each, int) else -1 for each in _column(batch, FORKED_TURN)], dtype=torch.int64
        ),
    )


def turn_numbers(batch: RolloutBatch) -> Tensor:
    """Return the number of the turn of each sampled token, from 0; int64 [B, R], -1 at other tokens."""
    is_sampled_BR = (batch["weight_versions"] >= 0) | batch["response_mask"].bool()
    return torch.where(is_sampled_BR, _starts(is_sampled_BR).long().cumsum(1) - 1, -1)


def turn_returns(rewards: Rewards, turns: Turns, *, gamma: float) -> Tensor:
    """Return the discounted return `G_t = r_t + gamma * G_(t+1)` of each turn, [B, T] float64; 0 in unscored rows.

    `r_t` is the weighted reward of the turn minus the penalties of its tokens. The last turn also gets the outcome.
    """
    num_turns = turns.rewards_BT.shape[1]
    penalties_BR = torch.where(rewards.mask_BR.bool(), rewards.penalties_BR.double(), 0.0)
    penalties_BT = sum_per_turn(penalties_BR, turns.numbers_BR, num_turns=num_turns)
    is_last_BT = torch.arange(num_turns) == turns.is_turn_BT.sum(dim=1, keepdim=True) - 1
    outcome_BT = torch.where(is_last_BT, rewards.outcome_B[:, None].double(), 0.0)
    rewards_BT = rewards.turn_weight * turns.rewards_BT - penalties_BT + outcome_BT
    rewards_BT = torch.where(rewards.is_scored_B[:, None], rewards_BT, 0.0)
    returns_BT = torch.zeros_like(rewards_BT)
    next_B = rewards_BT.new_zeros(len(rewards_BT))
    for turn in reversed(range(num_turns)):
        next_B = returns_BT[:, turn] = rewards_BT[:, turn] + gamma * next_B
    return returns_BT


def sum_per_turn(values_BR: Tensor, numbers_BR: Tensor, *, num_turns: int) -> Tensor:
    """Return the sum of the values of each turn's tokens, [B, T]."""
    sums_BT = values_BR.new_zeros(len(values_BR), num_turns + 1)
    sums_BT.scatter_add_(1, torch.where(numbers_BR < 0, num_turns, numbers_BR), values_BR)
    return sums_BT[:, :num_turns]


def _starts(is_sampled_BR: Tensor) -> Tensor:
    """Return bool [B, R]: the first token of each turn."""
    starts_BR = is_sampled_BR.clone()
    starts_BR[:, 1:] &= ~is_sampled_BR[:, :-1]
    return starts_BR


def _observations(batch: RolloutBatch, is_sampled_BR: Tensor) -> Iterator[list[Hashable]]:
    """Yield for each row what the model saw last before each of its turns."""
    width = batch["prompts"].shape[1]
    lengths: list[int] = batch["attention_mask"][:, :width].sum(dim=1).tolist()
    attachments_B = _column(batch, "attachments")
    starts_BR, ends_BR = _starts(is_sampled_BR), _starts(is_sampled_BR.flip(1)).flip(1)
    for row, length in enumerate(lengths):
        tokens = batch["input_ids"][row, width - length :]
        starts, ends = (
            (length + cast(Any, each_BR[row].nonzero().flatten())).tolist()
            for each_BR in (starts_BR, ends_BR)
        )
        observations: list[Hashable] = []
        for first, end in zip([0, *(end + 1 for end in ends[:-1])], starts, strict=False):
            images = [(a.start - first, a.digest) for a in attachments_B[row] or () if first <= a.start < end]
            observations.append((tokens[first:end].numpy().tobytes(), *images))
        yield observations


def _column(batch: RolloutBatch, name: str) -> list[Any]:
    """Return a column of tuples; empty ones if the batch does not have it."""
    is_there = name in set[str](cast(Any, batch).keys())
    return list(batch[name]) if is_there else [()] * len(batch)


def discounted_returns(rewards_BR: Tensor, *, mask_BR: Tensor, gamma: float) -> Tensor:
    """Return discounted returns `G_t = r_t + gamma * G_next`, [B, R] float64; 0 at masked tokens.

    `next` is the next sampled token, after those of tools and users (REINFORCE++, arXiv 2501.03262, with observations
    skipped).

    Args:
        rewards_BR: Reward of each token; rewards at masked tokens do not count.
        mask_BR: 1 for sampled tokens.
        gamma: Discount per sampled token.
    """
    nothing_BR = torch.zeros_like(rewards_BR)  # with values of 0, the advantage is the return
    return gae(rewards_BR, values_BR=nothing_BR, mask_BR=mask_BR, gamma=gamma, lam=1.0)


def gae(rewards_BR: Tensor, *, values_BR: Tensor, mask_BR: Tensor, gamma: float, lam: float) -> Tensor:
    """Return generalised advantage estimates (arXiv 1506.02438, equation 16), [B, R] float64; 0 at masked tokens.

    `A_t = d_t + gamma * lam * A_next` with `d_t = r_t + gamma * V_next - V_t`. `next` is the next sampled token, after
    those of tools and users. After the last sampled token, both are 0.

    Args:
        rewards_BR: Reward of each token; rewards at masked tokens do not count.
        values_BR: Values that the critic predicts before each token.
        mask_BR: 1 for sampled tokens.
        gamma: Discount per sampled token.
        lam: Weight of later rewards against the critic's next value.
    """
    is_model_BR = mask_BR.bool()
    rewards_BR, values_BR = rewards_BR.double(), values_BR.double()
    advantages_BR = torch.zeros_like(rewards_BR)
    next_value_B = next_advantage_B = rewards_BR.new_zeros(len(rewards_BR))
    for place in reversed(range(rewards_BR.shape[1])):
        is_model_B, value_B = is_model_BR[:, place], values_BR[:, place]
        delta_B = rewards_BR[:, place] + gamma * next_value_B - value_B
        advantage_B = delta_B + gamma * lam * next_advantage_B
        next_value_B = torch.where(is_model_B, value_B, next_value_B)
        next_advantage_B = torch.where(is_model_B, advantage_B, next_advantage_B)
        advantages_BR[:, place] = torch.where(is_model_B, advantage_B, 0.0)
    return advantages_BR


def whiten(
    values_BR: Tensor, *, mask_BR: Tensor, weights_B: Tensor | None = None, eps: float = 1e-8
) -> Tensor:
    """Return `(x - mean) / sqrt(variance + eps)` over all unmasked tokens, [B, R]; 0 at masked tokens.

    The variance is the sample's (divided by n - 1). Equal values give exactly 0.

    Args:
        values_BR: Values to whiten.
        mask_BR: 1 for tokens that count.
        weights_B: Weight of the tokens of each row in mean and variance; None is 1.
        eps: Keeps the division finite.
    """
    is_counted_BR = mask_BR.bool()
    counted_N = values_BR[is_counted_BR]
    if not len(counted_N) or counted_N.min() == counted_N.max():
        return torch.zeros_like(values_BR)
    weights_BR = torch.ones_like(values_BR) if weights_B is None else weights_B[:, None].expand_as(values_BR)
    weights_N = weights_BR[is_counted_BR].to(values_BR.dtype)
    count = weights_N.sum()
    centred_BR = torch.where(is_counted_BR, values_BR - (counted_N * weights_N).sum() / count, 0.0)
    variance = (weights_BR * centred_BR.square()).sum() / (count - 1).clamp(min=1)
    return centred_BR / (variance + eps).sqrt()

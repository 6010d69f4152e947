"""Observations, penalties of length and rows that are not trained, in the estimates of advantages."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agent_loop.config import AlgorithmConfig
from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.training.advantages.estimate import BatchAdvantages, estimate_advantages, load_estimator
from agent_loop.training.advantages.rewards import Rewards, collect_rewards, overlong_penalty
from agent_loop.training.advantages.turns import discounted_returns, gae
from tests.harness import examples
from tests.training.fakes import PAD, sample_trajectories, tiny_policy

LIMIT = 12
WEIGHT = 0.5


@pytest.fixture(scope="module")
def batch() -> RolloutBatch:
    return assemble(sample_trajectories(tiny_policy(), num_groups=4, n=4), pad_token_id=PAD)


def estimate(batch: RolloutBatch, config: AlgorithmConfig, **options: Any) -> BatchAdvantages:
    return estimate_advantages(collect(batch, config), estimator=load_estimator(config), **options)


def collect(batch: RolloutBatch, config: AlgorithmConfig, **options: Any) -> Rewards:
    return collect_rewards(batch, config=config, response_length=LIMIT, **options)


def naive_returns(rewards: list[float], gamma: float) -> list[float]:
    return [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]


@examples(60)
@given(st.data())
def test_observations_between_turns_change_no_return(data: st.DataObject) -> None:
    masks = data.draw(st.lists(st.booleans(), min_size=1, max_size=12))
    garbage = data.draw(st.sampled_from([math.nan, math.inf, 7.0]))
    mask_BR = torch.tensor([masks])
    generator = torch.Generator().manual_seed(len(masks))
    rewards_BR, values_BR = (torch.randn(1, len(masks), generator=generator) for _ in range(2))

    def with_garbage(values_BR: Tensor) -> Tensor:
        return torch.where(mask_BR, values_BR, garbage)

    options: dict[str, Any] = {"gamma": 0.9, "lam": 0.7}
    found_BR = gae(with_garbage(rewards_BR), values_BR=with_garbage(values_BR), mask_BR=mask_BR, **options)
    compact_BR = gae(
        rewards_BR[mask_BR][None],
        values_BR=values_BR[mask_BR][None],
        mask_BR=torch.ones(1, int(mask_BR.sum())),
        **options,
    )

    assert torch.equal(found_BR[mask_BR], compact_BR[0])
    assert not found_BR[~mask_BR].any()
    returns_BR = discounted_returns(with_garbage(rewards_BR), mask_BR=mask_BR, gamma=0.9)
    assert returns_BR[mask_BR].tolist() == pytest.approx(naive_returns(rewards_BR[mask_BR].tolist(), 0.9))


def test_the_soft_punishment_rises_over_the_buffer() -> None:
    lengths_B = torch.tensor([0, 8, 9, 10, 12, 13])

    assert overlong_penalty(lengths_B, limit=12, buffer=4).tolist() == [0, 0, 0.25, 0.5, 1, 1]


def test_the_length_penalty_is_subtracted_before_rewards_are_compared(batch: RolloutBatch) -> None:
    config = AlgorithmConfig(overlong_buffer=8, overlong_penalty=2.0)

    shaped_B = collect(batch, config).outcome_B

    lengths_B = batch["attention_mask"][:, batch["prompts"].shape[1] :].sum(dim=1)
    expected_B = batch["reward"] - 2.0 * ((lengths_B - 4) / 8).clamp(0, 1)
    torch.testing.assert_close(shaped_B, expected_B, equal_nan=True)
    assert (lengths_B > 4).any()


def test_rows_that_are_not_trainable_still_count_in_their_group(batch: RolloutBatch) -> None:
    config = AlgorithmConfig()
    free = estimate(batch, config)
    is_allowed_B = torch.arange(len(batch)) != int(free.keep_B.nonzero()[0])

    bound = estimate(batch, config, is_allowed_B=is_allowed_B)

    assert torch.equal(free.advantages_BR, bound.advantages_BR)
    assert torch.equal(bound.keep_B, free.keep_B & is_allowed_B)

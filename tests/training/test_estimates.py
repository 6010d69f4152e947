"""Every estimator equals a token-by-token reference on trajectories of several turns and lengths."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
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
    """Return rows of two turns. One row is unscored, some turns have rewards, one group has equal outcomes."""
    trajectories = sample_trajectories(tiny_policy(), num_groups=4, n=4)
    generator = torch.Generator().manual_seed(3)
    outcomes = torch.randn(len(trajectories), generator=generator).tolist()
    trajectories = [
        structs.replace(t, reward=None if row == 2 else 0.5 if t.group == 3 else outcomes[row])
        for row, t in enumerate(trajectories)
    ]
    batch = assemble(trajectories, pad_token_id=PAD)
    mask_BR = batch["response_mask"].bool()
    has_BR = (torch.rand(mask_BR.shape, generator=generator) < 0.3) & mask_BR & (batch["group"] != 3)[:, None]
    batch["has_turn_reward"] = has_BR
    batch["turn_rewards"] = torch.where(has_BR, torch.randn(mask_BR.shape, generator=generator), 0.0)
    return batch


def estimate(batch: RolloutBatch, config: AlgorithmConfig, **options: Any) -> BatchAdvantages:
    return estimate_advantages(collect(batch, config), estimator=load_estimator(config), **options)


def collect(batch: RolloutBatch, config: AlgorithmConfig, **options: Any) -> Rewards:
    return collect_rewards(batch, config=config, response_length=LIMIT, **options)


def model_tokens(batch: RolloutBatch, row: int) -> list[int]:
    return batch["response_mask"][row].nonzero().flatten().tolist()


def naive_rewards(batch: RolloutBatch, row: int, *, outcome: float | None = None) -> list[float]:
    """Return the rewards of the sampled tokens of a row, in order."""
    places = model_tokens(batch, row)
    rewards = [WEIGHT * float(batch["turn_rewards"][row, index]) for index in places]
    rewards[-1] += float(batch["reward"][row]) if outcome is None else outcome
    return rewards


def naive_returns(rewards: list[float], gamma: float) -> list[float]:
    return [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]


def naive_whitened(values: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    mean, deviation = statistics.mean(values.values()), statistics.stdev(values.values())
    return {index: (value - mean) / deviation for index, value in values.items()}


def scored_rows(batch: RolloutBatch) -> list[int]:
    return [row for row in range(len(batch)) if not math.isnan(batch["reward"][row])]


def assert_advantages(
    found: BatchAdvantages, expected: dict[tuple[int, int], float], *, batch: RolloutBatch
) -> None:
    """Check that the expected rows are kept, and that each of their sampled tokens has the expected value."""
    assert found.keep_B.nonzero().flatten().tolist() == sorted({row for row, _ in expected})
    assert found.advantages_BR.dtype == torch.float32
    assert found.advantages_BR.shape == batch["responses"].shape
    trained = [(row, index) for row in {row for row, _ in expected} for index in model_tokens(batch, row)]
    assert set(trained) == set(expected)
    for row, index in trained:
        assert float(found.advantages_BR[row, index]) == pytest.approx(expected[row, index], abs=1e-4)


@pytest.mark.parametrize("whitens", [True, False])
def test_gae_is_computed_over_sampled_tokens(batch: RolloutBatch, whitens: bool) -> None:
    gamma, lam = 0.95, 0.8
    values_BR = torch.randn(batch["responses"].shape, generator=torch.Generator().manual_seed(0))
    config = AlgorithmConfig(
        adv_estimator="gae", gamma=gamma, lam=lam, turn_reward_weight=WEIGHT, whiten_advantages=whitens
    )
    expected: dict[tuple[int, int], float] = {}
    for row in scored_rows(batch):
        places, rewards = model_tokens(batch, row), naive_rewards(batch, row)
        values = [*(float(values_BR[row, index]) for index in places), 0.0]
        deltas = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(rewards)]
        for index, value in zip(places, naive_returns(deltas, gamma * lam), strict=True):
            expected[row, index] = value

    found = estimate(batch, config, values_BR=values_BR)

    assert_advantages(found, naive_whitened(expected) if whitens else expected, batch=batch)
    assert found.returns_BR is not None
    for (row, index), value in expected.items():
        assert float(found.returns_BR[row, index]) == pytest.approx(
            value + float(values_BR[row, index]), abs=1e-5
        )


def test_grpo_adds_the_process_advantage_and_subtracts_the_kl_of_whole_rows(batch: RolloutBatch) -> None:
    kl_BR = batch["response_mask"] * torch.rand(
        batch["responses"].shape, generator=torch.Generator().manual_seed(0)
    )
    config = AlgorithmConfig(kl_reward_coef=0.1, norm_adv_by_std_in_grpo=False)
    rewards = collect(batch, config, kl_BR=kl_BR)

    found = estimate_advantages(rewards, estimator=load_estimator(config))

    scores = {row: float(batch["reward"][row] - 0.1 * kl_BR[row].sum()) for row in scored_rows(batch)}
    groups = batch["group"].tolist()
    expected = {
        (row, index): score
        - statistics.mean(s for other, s in scores.items() if groups[other] == groups[row])
        for row, score in scores.items()
        for index in model_tokens(batch, row)
    }
    assert_advantages(found, expected, batch=batch)
    assert torch.allclose(rewards.per_row()[scored_rows(batch)], torch.tensor(list(scores.values())).double())


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
    is_allowed_B = torch.arange(len(batch)) != 0

    free, bound = estimate(batch, config), estimate(batch, config, is_allowed_B=is_allowed_B)

    assert torch.equal(free.advantages_BR, bound.advantages_BR)
    assert free.keep_B[0]
    assert torch.equal(bound.keep_B, free.keep_B & is_allowed_B)


def test_unscored_rows_are_never_kept_and_change_nothing(batch: RolloutBatch) -> None:
    for estimator in ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae", "remax"):
        config = AlgorithmConfig(adv_estimator=estimator, turn_reward_weight=WEIGHT)
        rows = torch.tensor([row for row in range(len(batch)) if row != 2])
        options = {"values_BR": torch.zeros(batch["responses"].shape), "baselines_B": torch.zeros(len(batch))}

        whole = estimate(batch, config, **options)
        without = estimate(batch[rows], config, **{name: value[rows] for name, value in options.items()})

        assert not whole.keep_B[2]
        torch.testing.assert_close(whole.advantages_BR[rows], without.advantages_BR)
        assert whole.advantages_BR[whole.keep_B].isfinite().all()

"""Advantages equal a reference implementation that works group by group."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.training.advantages.groups import grpo_advantages, has_signal, rloo_advantages
from tests.harness import examples

rewards = st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0, math.nan])


def naive_advantages(rewards: list[float], groups: list[int], *, norm_by_std: bool) -> list[float]:
    advantages: list[float] = []
    for reward, group in zip(rewards, groups, strict=True):
        scored = [r for r, g in zip(rewards, groups, strict=True) if g == group and not math.isnan(r)]
        if math.isnan(reward) or len(set(scored)) < 2:
            advantages.append(0.0)
            continue
        scale = statistics.stdev(scored) + 1e-6 if norm_by_std else 1.0
        advantages.append((reward - statistics.mean(scored)) / scale)
    return advantages


@examples(150)
@given(rows=st.lists(st.tuples(rewards, st.integers(0, 3)), max_size=20), norm_by_std=st.booleans())
def test_advantages_match_the_formula_on_ragged_groups(
    rows: list[tuple[float, int]], norm_by_std: bool
) -> None:
    values, groups = [reward for reward, _ in rows], [group for _, group in rows]

    advantages_B = grpo_advantages(
        torch.tensor(values), groups_B=torch.tensor(groups, dtype=torch.int64), norm_by_std=norm_by_std
    )

    expected = naive_advantages(torch.tensor(values).tolist(), groups, norm_by_std=norm_by_std)
    assert advantages_B.dtype == torch.float32
    assert advantages_B.tolist() == pytest.approx(expected, abs=1e-5)


def test_equal_rewards_give_exactly_zero_and_no_signal() -> None:
    rewards_B, groups_B = torch.full((7,), 0.1), torch.zeros(7, dtype=torch.int64)

    assert grpo_advantages(rewards_B, groups_B=groups_B).tolist() == [0.0] * 7
    assert not has_signal(rewards_B, groups_B=groups_B).any()


def test_a_group_of_one_gets_zero() -> None:
    advantages_B = grpo_advantages(torch.tensor([1.0, 0.0, 1.0]), groups_B=torch.tensor([4, 5, 5]))

    assert advantages_B[0] == 0
    assert advantages_B[1] < 0 < advantages_B[2]


def test_an_unscored_trajectory_has_no_signal_and_changes_no_statistic() -> None:
    rewards_B = torch.tensor([1.0, math.nan, 0.0])
    groups_B = torch.zeros(3, dtype=torch.int64)

    advantages_B = grpo_advantages(rewards_B, groups_B=groups_B, norm_by_std=False)

    assert advantages_B.tolist() == [0.5, 0.0, -0.5]
    assert has_signal(rewards_B, groups_B=groups_B).tolist() == [True, False, True]


@examples(100)
@given(rows=st.lists(st.tuples(rewards, st.integers(0, 3)), max_size=20))
def test_leave_one_out_compares_with_the_mean_of_the_others(rows: list[tuple[float, int]]) -> None:
    values = torch.tensor([reward for reward, _ in rows], dtype=torch.float32).tolist()
    groups = [group for _, group in rows]
    expected: list[float] = []
    for index, (reward, group) in enumerate(zip(values, groups, strict=True)):
        others = [
            r
            for other, (r, g) in enumerate(zip(values, groups, strict=True))
            if other != index and g == group and not math.isnan(r)
        ]
        is_alone = math.isnan(reward) or not others
        expected.append(0.0 if is_alone else reward - statistics.mean(others))

    advantages_B = rloo_advantages(torch.tensor(values), groups_B=torch.tensor(groups, dtype=torch.int64))

    assert advantages_B.tolist() == pytest.approx(expected, abs=1e-5)

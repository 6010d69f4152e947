"""Samplers of rows, and the history that they look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_loop.config import DataConfig, SamplerConfig
from agent_loop.errors import AlgorithmError
from agent_loop.rollout.rows import RowSampler
from agent_loop.training.registry import SAMPLERS, row_sampler
from agent_loop.training.samplers import (
    RowHistory,
    RowResult,
    SamplerContext,
    curriculum,
    curriculum_weights,
    load_sampler,
    row_results,
    uniform,
)
from agent_loop.trajectory import AgentLoopOutput, Trajectory

NUM_SCORED = 8


@pytest.fixture(autouse=True)
def registrations_of_this_test() -> Iterator[None]:
    store = SAMPLERS._functions  # pyright: ignore[reportPrivateUsage]
    before = dict(store)
    yield
    store.clear()
    store.update(before)


def result(row: int, num_successes: int, *, mean_reward: float | None = None) -> RowResult:
    share = num_successes / NUM_SCORED
    return RowResult(row, NUM_SCORED, num_successes, share if mean_reward is None else mean_reward)


def context_of(num_rows: int, results: Sequence[RowResult] = (), **settings: Any) -> SamplerContext:
    sampler = SamplerConfig(**settings)
    history = RowHistory(num_rows, config=sampler)
    history.observe(1, results)
    config = DataConfig(sampler=sampler, seed=3)
    return SamplerContext([{"n": n} for n in range(num_rows)], history, 2, config)


def trajectory(group: int, rollout: int, reward: float | None, *, branch: int | None = None) -> Trajectory:
    output = AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1])
    return Trajectory(output, {}, group, rollout, reward, {}, branch)


def test_uniform_selects_the_rows_of_the_epochs_and_then_the_others() -> None:
    context = context_of(10)
    order = RowSampler(range(10), batch_size=2, seed=3)

    for step in range(1, 12):
        assert uniform(step, count=2, context=context) == order.batch(step)
        whole = uniform(step, count=10, context=context)
        assert whole == [*order.batch(step), *order.others(step, skip=0, count=8)]
        assert sorted(whole) == list(range(10))


def test_curriculum_draws_rows_in_proportion_to_their_weights() -> None:
    successes = {0: 0, 1: 1, 2: 4, 3: 7, 4: 8}
    context = context_of(6, [result(row, n) for row, n in successes.items()], floor=0.1)
    weights_N = curriculum_weights(context.history, floor=0.1)
    num_draws = 10_000

    counts = Counter(curriculum(step, count=1, context=context)[0] for step in range(num_draws))

    shares = [n / NUM_SCORED for n in successes.values()]
    assert weights_N == pytest.approx([0.1 + 0.9 * 4 * p * (1 - p) for p in shares] + [1.0])
    expected_N = num_draws * weights_N / weights_N.sum()
    chi_square = sum((counts[row] - expected) ** 2 / expected for row, expected in enumerate(expected_N))
    assert chi_square < 20.5  # 5 degrees of freedom: exceeded once in a thousand draws of a seed


def test_curriculum_draws_each_row_once_and_depends_on_the_step_and_the_seed_alone() -> None:
    context = context_of(50, [result(row, row % 9) for row in range(30)])

    orders = [curriculum(step, count=50, context=context) for step in (1, 1, 2)]

    assert sorted(orders[0]) == list(range(50))
    assert orders[0] == orders[1] != orders[2]
    assert curriculum(1, count=7, context=context) == orders[0][:7]


def test_the_estimate_is_a_moving_average_of_successes_or_of_rewards() -> None:
    by_success = RowHistory(2, config=SamplerConfig(smoothing=0.25))
    by_reward = RowHistory(2, config=SamplerConfig(smoothing=0.25, success="reward"))
    for history in (by_success, by_reward):
        history.observe(1, [result(0, 8, mean_reward=0.5)])
        history.observe(2, [result(0, 0, mean_reward=7.0)])

    assert by_success.success_N[0] == 0.75
    assert by_reward.success_N[0] == 0.5 + 0.25 * 0.5
    assert np.isnan(by_success.success_N[1])
    assert by_success.num_results_N.tolist() == [2, 0]
    assert by_success.last_step_N.tolist() == [2, 0]


def test_a_row_is_skipped_after_a_streak_and_comes_back_when_its_time_is_over() -> None:
    history = RowHistory(3, config=SamplerConfig(skip_solved=2, skip_failed=3, skip_for=4))
    for step in (1, 2, 3):
        history.observe(step, [result(0, 8), result(1, 0), result(2, 8 if step % 2 else 4)])

    def skipped(step: int) -> dict[str, list[int]]:
        return {name: np.flatnonzero(is_N).tolist() for name, is_N in history.skipped_by(step).items()}

    assert skipped(4) == skipped(7) == {"skip_solved": [0], "skip_failed": [1]}
    assert skipped(8) == {"skip_solved": [], "skip_failed": []}
    history.observe(8, [result(1, 0)])
    assert skipped(9) == {"skip_solved": [], "skip_failed": [1]}


def test_results_count_scored_rollouts_once_however_many_branches_they_have() -> None:
    trajectories = [
        trajectory(0, 0, 1.0, branch=0),
        trajectory(0, 0, 0.0, branch=1),
        trajectory(0, 1, 0.0),
        trajectory(0, 2, None),
        trajectory(1, 0, None),
        trajectory(2, 0, 2.0),
    ]

    results = row_results(trajectories, rows=[7, 8, 9], success_threshold=1.0)

    assert results == [RowResult(7, 2, 1, 0.25), RowResult(9, 1, 1, 2.0)]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([0.5, 1.0], "return indices"),
        ([0], "returned 1 indices, where count is 2"),
        ([0, 9], "indices from 0 to 3"),
        ([-1, 0], "indices from 0 to 3"),
        (None, "return indices"),
    ],
)
def test_a_wrong_result_of_a_sampler_ends_the_training_with_its_name(returned: Any, message: str) -> None:
    def mine(step: int, *, count: int, context: SamplerContext) -> Any:
        return returned

    row_sampler("mine")(mine)

    with pytest.raises(AlgorithmError, match=f"data.sampler.name=mine.*{message}"):
        load_sampler("mine").order(1, count=2, context=context_of(4))


def test_a_sampler_of_a_user_is_loaded_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "samplers.py"
    file.write_text("def last(step, *, count, context):\n    return range(len(context.rows))[::-1]\n")

    assert load_sampler(f"{file}:last").order(1, count=2, context=context_of(4)) == [3, 2]

"""Evaluations equal counts by hand, and their intervals are tested by simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from agent_loop.errors import DataError
from agent_loop.storage import write_trajectories
from agent_loop.training.evaluation.estimates import (
    MeanEstimate,
    estimate_difference,
    estimate_share,
    pass_at_k,
)
from agent_loop.training.evaluation.scores import (
    Evaluation,
    RowResult,
    categories_of,
    changed_pairs,
    difference,
    pair_rows,
    score,
    score_categories,
    summarise,
)
from agent_loop.training.evaluation.summary import EvaluationSummary, evaluate_stored, read_summary
from agent_loop.trajectory import AgentLoopOutput, Failure, FailureKind, Incident, IncidentKind, Trajectory
from agent_loop.types import StopReason
from tests.helpers import user


def trajectory(
    group: int, rollout: int, reward: float | None, *, branch: int | None = None, **facts: object
) -> Trajectory:
    return Trajectory(
        output=AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], **facts),
        row={"raw_prompt": user(f"question {group}")},
        group=group,
        rollout=rollout,
        reward=reward,
        reward_extra={},
        branch=branch,
    )


def result(group: int, *, num_correct: int, num_samples: int = 1, prompt: str = "") -> RowResult:
    return RowResult(
        group=group,
        prompt=prompt or f"question {group}",
        prompt_digest=prompt or f"digest {group}",
        num_samples=num_samples,
        num_scored=num_samples,
        num_correct=num_correct,
        mean_reward=num_correct / num_samples,
    )


def evaluation_of(rewards: Sequence[Sequence[float | None]]) -> Evaluation:
    return summarise(
        [trajectory(g, r, reward) for g, group in enumerate(rewards) for r, reward in enumerate(group)],
        success_threshold=1.0,
    )


@pytest.mark.parametrize("num_samples", [1, 2, 5])
def test_pass_at_k_is_the_share_of_draws_with_a_correct_sample(num_samples: int) -> None:
    for num_correct in range(num_samples + 1):
        for k in range(1, num_samples + 1):
            draws = list(combinations([True] * num_correct + [False] * (num_samples - num_correct), k))
            expected = sum(map(any, draws)) / len(draws)
            assert pass_at_k(num_samples, num_correct=num_correct, k=k) == pytest.approx(expected)


def test_a_summary_counts_successes_reasons_and_incidents() -> None:
    incident = Incident(IncidentKind.TOOL_ERROR, "no such file")
    evaluation = summarise(
        [
            trajectory(0, 0, 1.0),
            trajectory(0, 1, 0.0, incidents=[incident, incident]),
            trajectory(1, 0, 0.5, stop_reason=StopReason.DEADLINE),
            trajectory(1, 1, None, stop_reason=StopReason.FAILED),
        ],
        success_threshold=1.0,
    )

    scores = evaluation.scores
    assert (scores.num_rows, scores.num_samples, scores.num_scored, scores.num_correct) == (2, 4, 3, 1)
    assert scores.mean_reward == MeanEstimate(0.5, None, None)
    assert evaluation.success_share == 0.25
    assert {k: estimate.value for k, estimate in scores.pass_at_k.items()} == {1: 0.25, 2: 0.5}
    assert evaluation.stop_reasons == {"answered": 2, "deadline": 1, "failed": 1}
    assert evaluation.incidents == {"tool_error": 2}
    assert [(row.prompt, row.num_correct, row.mean_reward) for row in evaluation.rows] == [
        ("question 0", 1, 0.5),
        ("question 1", 0, 0.5),
    ]
    metrics = evaluation.metrics()
    assert metrics["val/reward/success_share"] == 0.25
    assert metrics["val/reward/mean"] == 0.5
    assert metrics["val/pass@2"] == 0.5
    assert metrics["val/pass@1/half_width"] == scores.pass_at_k[1].half_width
    assert metrics["val/rollout/stop_reason/failed"] == 0.25
    assert metrics["val/rollout/incidents/tool_error"] == 0.5


def test_the_branches_of_a_rollout_are_one_sample_with_the_best_reward() -> None:
    evaluation = summarise(
        [
            trajectory(0, 0, 0.0, branch=0),
            trajectory(0, 0, 1.0, branch=1),
            trajectory(0, 0, None, branch=2),
            trajectory(0, 1, 0.0),
        ],
        success_threshold=1.0,
    )

    (row,) = evaluation.rows
    assert (evaluation.num_trajectories, row.num_samples, row.num_correct, row.mean_reward) == (4, 2, 1, 0.5)
    assert list(evaluation.scores.pass_at_k) == [1, 2]


# -- intervals ---------------------------------------------------------------------------------------------------------


def test_the_interval_of_single_samples_is_wilsons() -> None:
    # 8 of 10, as in Brown, Cai and DasGupta 2001 and every table of Wilson's interval
    estimate = estimate_share([1.0] * 8 + [0.0] * 2, num_draws=10)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)
    nothing = estimate_share([0.0] * 10, num_draws=10)
    assert (nothing.low, nothing.high) == pytest.approx((0.0, 0.2775), abs=1e-4)


@pytest.mark.parametrize("num_rows", [10, 100])
@pytest.mark.parametrize(("num_samples", "k"), [(1, 1), (8, 1), (8, 4), (8, 8)])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.2, 0.2), (4.0, 4.0), (0.5, 2.0)])
def test_95_percent_of_the_intervals_of_pass_at_k_contain_the_true_value(
    num_rows: int, num_samples: int, k: int, alpha: float, beta: float
) -> None:
    """Draw the difficulties of rows from a beta distribution: spread, either 0 or 1, similar, or mostly hard."""
    # E[(1 - p)^k] of a beta distribution
    truth = 1 - math.prod((beta + i) / (alpha + beta + i) for i in range(k))
    random = np.random.default_rng([num_rows, num_samples, k])
    values = np.array([pass_at_k(num_samples, num_correct=c, k=k) for c in range(num_samples + 1)])
    num_trials = 300
    hits = 0
    for _ in range(num_trials):
        shares = values[random.binomial(num_samples, random.beta(alpha, beta, num_rows))]
        estimate = estimate_share(shares.tolist(), num_draws=num_rows * num_samples / k)
        assert estimate.low is not None
        assert estimate.high is not None
        assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
        hits += estimate.low <= truth <= estimate.high
    # 0.95 less three standard errors of 300 trials
    assert hits / num_trials >= 0.91


@pytest.mark.parametrize("num_samples", [1, 8])
@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_95_percent_of_the_intervals_of_a_difference_contain_the_true_value(
    num_samples: int, loss: float
) -> None:
    random = np.random.default_rng([num_samples, int(10 * loss)])
    num_trials, num_rows = 300, 40
    hits = 0
    for _ in range(num_trials):
        chances = random.beta(1, 1, num_rows)
        better = random.binomial(num_samples, chances) / num_samples
        worse = random.binomial(num_samples, chances * (1 - loss)) / num_samples
        estimate = estimate_difference((better - worse).tolist(), num_samples=num_samples)
        assert estimate.low is not None
        assert estimate.high is not None
        hits += estimate.low <= 0.5 * loss <= estimate.high
    assert hits / num_trials >= 0.91


# -- categories --------------------------------------------------------------------------------------------------------


def test_categories_are_values_of_a_column_or_of_a_nested_field() -> None:
    rows = [
        {"level": 10, "extra_info": {"kind": "sums", "tags": ["a", "é"]}},
        {"level": 9, "extra_info": {"kind": ""}, "extra_info.kind": "its own column"},
        {"extra_info": "text"},
    ]
    assert categories_of(rows, column="level") == ["10", "9", "-"]
    assert categories_of(rows, column="extra_info.kind") == ["sums", "its own column", "-"]
    assert categories_of(rows, column="extra_info.tags") == ['["a", "\\u00e9"]', "-", "-"]


def test_a_column_that_no_row_has_is_refused_with_the_nearest() -> None:
    with pytest.raises(DataError, match=r"no row has a column 'levle'; did you mean 'level'"):
        categories_of([{"level": 1}], column="levle")


def test_each_category_has_separate_scores_and_numbers_are_sorted() -> None:
    evaluation = evaluation_of([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    scores = score_categories(evaluation.rows, categories=["10", "9", "10"])

    assert list(scores) == ["9", "10"]
    assert (scores["10"].num_rows, scores["10"].num_samples, scores["10"].num_correct) == (2, 4, 2)
    assert scores["9"].pass_at_k[2].value == 1.0
    assert scores["9"] == score(evaluation.rows[1:2])


# -- comparisons and files ---------------------------------------------------------------------------------------------


def test_rows_are_paired_by_their_prompts_in_any_order() -> None:
    rows = [result(0, num_correct=1, prompt="a"), result(1, num_correct=1, prompt="twice")]
    rows += [result(2, num_correct=0, prompt="twice"), result(3, num_correct=1, prompt="new")]
    others = [result(0, num_correct=0, prompt="twice"), result(1, num_correct=1, prompt="twice")]
    others += [result(2, num_correct=0, prompt="a")]

    pairs = pair_rows(rows, others=others)
    assert [(row.group, other.group) for row, other in pairs] == [(0, 2), (1, 0), (2, 1)]
    found = difference(pairs)
    assert found is not None
    assert (found.num_rows, found.pass_at_1.value) == (3, pytest.approx(1 / 3))


def summary_of(rewards: Sequence[Sequence[float | None]], **more: object) -> EvaluationSummary:
    return EvaluationSummary.of(evaluation_of(rewards), model="a model", settings={}, columns={}, **more)


def test_a_summary_is_read_as_it_was_written(tmp_path: Path) -> None:
    other = summary_of([[0.0], [None]])
    summary = EvaluationSummary.of(
        evaluation_of([[1.0], [0.5]]),
        model="model \ud800".encode("utf-8", "replace").decode(),
        settings={"rows": "digest"},
        columns={"level": ["easy", "hard"]},
        other=(tmp_path / "other", other),
    )
    summary.write(tmp_path / "summary.json")

    assert read_summary(tmp_path) == summary == read_summary(tmp_path / "summary.json")
    assert summary.comparison is not None
    assert summary.comparison.total.pass_at_1.value == 0.5
    assert {k: d.pass_at_1.value for k, d in summary.comparison.categories["level"].items()} == {
        "easy": 1.0,
        "hard": 0.0,
    }
    assert summary.comparison.categories["level"]["hard"].mean_reward is None


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "Invalid JSON"),
        ("[1]", "Input should be an object"),
        ('{"format": 2}', "format: Input should be 1"),
    ],
)
def test_a_file_that_is_not_a_summary_is_refused_with_its_path(
    tmp_path: Path, content: str, complaint: str
) -> None:
    (tmp_path / "summary.json").write_text(content, encoding="utf-8")
    with pytest.raises(
        DataError, match=rf"summary.json' is not the summary of an evaluation: .*({complaint})"
    ):
        read_summary(tmp_path)


def test_stored_trajectories_are_evaluated_like_those_in_memory(tmp_path: Path) -> None:
    lost = Failure("ServerError: gone", "", FailureKind.SERVER)
    broken = Failure("ValueError: no", "", FailureKind.CODE)
    incident = Incident(kind=IncidentKind.UNKNOWN_TOOL, detail="", assistant_turn=1)
    trajectories = [
        trajectory(0, 0, 1.0, branch=0),
        trajectory(0, 0, 0.0, branch=1),
        trajectory(0, 1, 0.4, incidents=[incident]),
        trajectory(2, 0, None, stop_reason=StopReason.FAILED, failure=lost),
        trajectory(2, 1, None, stop_reason=StopReason.FAILED, failure=broken),
        trajectory(2, 2, 0.5),
    ]
    path = tmp_path / "trajectories.parquet"
    write_trajectories(path, trajectories, step=0, split="eval", success_threshold=0.5)
    stored = evaluate_stored([path])
    assert stored.evaluation == summarise(trajectories, success_threshold=0.5)
    assert [row.get("raw_prompt", [{}])[-1].get("content") for row in stored.rows] == [
        "question 0",
        None,
        "question 2",
    ]


def test_rows_that_flip_come_first_and_equal_rows_are_left_out() -> None:
    rows = [
        result(0, num_correct=2, num_samples=4),
        result(1, num_correct=1),
        result(2, num_correct=4, num_samples=4),
    ]
    others = [
        result(0, num_correct=1, num_samples=4),
        result(1, num_correct=1),
        result(2, num_correct=2, num_samples=4),
    ]
    assert [row.group for row, _ in changed_pairs(pair_rows(rows, others=others))] == [0, 2]

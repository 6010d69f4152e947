"""Evaluations against counting by hand."""

from __future__ import annotations

from itertools import combinations

import pytest

from agent_loop.training.evaluation import pass_at_k, summarise
from agent_loop.trajectory import AgentLoopOutput, Incident, IncidentKind, Trajectory
from agent_loop.types import StopReason


def trajectory(group: int, rollout: int, reward: float | None, **facts: object) -> Trajectory:
    output = AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], **facts)
    return Trajectory(
        output=output, row={"n": group}, group=group, rollout=rollout, reward=reward, reward_extra={}
    )


@pytest.mark.parametrize("num_samples", [1, 2, 5])
def test_pass_at_k_is_the_share_of_draws_with_a_correct_sample(num_samples: int) -> None:
    for num_correct in range(num_samples + 1):
        for k in range(1, num_samples + 1):
            draws = list(combinations([True] * num_correct + [False] * (num_samples - num_correct), k))
            expected = sum(map(any, draws)) / len(draws)
            assert pass_at_k(num_samples, num_correct=num_correct, k=k) == pytest.approx(expected)


@pytest.mark.parametrize(("num_samples", "num_correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_pass_at_k_refuses_what_cannot_be(num_samples: int, num_correct: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"out of 4; give 0 <= num_correct"):
        pass_at_k(num_samples, num_correct=num_correct, k=k)


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

    assert (evaluation.num_trajectories, evaluation.num_scored) == (4, 3)
    assert evaluation.mean_reward == 0.5
    assert evaluation.success_share == 0.25
    assert evaluation.pass_at_k == {1: 0.25, 2: 0.5}
    assert evaluation.stop_reasons == {"answered": 2, "deadline": 1, "failed": 1}
    assert evaluation.incidents == {"tool_error": 2}
    assert [(row.row["n"], row.num_correct, row.mean_reward) for row in evaluation.rows] == [
        (0, 1, 0.5),
        (1, 0, 0.5),
    ]
    metrics = evaluation.metrics()
    assert metrics["val/reward/success_share"] == 0.25
    assert metrics["val/pass@2"] == 0.5
    assert metrics["val/rollout/stop_reason/failed"] == 0.25
    assert metrics["val/rollout/incidents/tool_error"] == 0.5


def test_nothing_scored_has_no_mean_reward_and_no_success() -> None:
    evaluation = summarise([trajectory(0, 0, None)], success_threshold=0.0)

    assert evaluation.mean_reward is None
    assert evaluation.success_share == 0
    assert "val/reward/mean" not in evaluation.metrics()
    assert summarise([], success_threshold=1.0).metrics() == {}

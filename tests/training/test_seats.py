"""Games of several players: rewards are compared with those of the same seat only, and means count rollouts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from agent_loop.config import AlgorithmConfig
from agent_loop.rollout.batch import assemble
from agent_loop.training.advantages.estimate import estimate_advantages, load_estimator
from agent_loop.training.advantages.rewards import collect_rewards
from agent_loop.training.step_metrics import rollout_metrics
from agent_loop.trajectory import Trajectory
from tests.training.samples import Branch, Rollout, samples_of

REWARDS = [[1.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [1.0, -1.0]]
"""Reward of each seat in each rollout of a zero-sum game."""


def game(rewards: Sequence[Sequence[float | None]]) -> list[Rollout]:
    return [
        Rollout(tuple(Branch(reward, seat=seat) for seat, reward in enumerate(seats))) for seats in rewards
    ]


def trajectories_of(*groups: Sequence[Rollout]) -> list[Trajectory]:
    return [sample.trajectory for sample in samples_of(groups)]


def advantages(trajectories: list[Trajectory], estimator: str) -> torch.Tensor:
    config = AlgorithmConfig(adv_estimator=estimator)
    rewards = collect_rewards(assemble(trajectories, pad_token_id=0), config=config, response_length=8)
    return estimate_advantages(rewards, estimator=load_estimator(config)).advantages_BR[:, 0]


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_each_seat_has_the_advantages_that_it_has_alone(estimator: str) -> None:
    trajectories = trajectories_of(game(REWARDS))
    both = advantages(trajectories, estimator)
    for seat in (0, 1):
        alone = [t for t in trajectories if t.output.extra_fields["seat"] == seat]
        torch.testing.assert_close(both[seat::2], advantages(alone, estimator))
    assert both[0] > 0 > both[1]


def test_whitened_advantages_count_a_rollout_once_with_any_number_of_seats() -> None:
    trajectories = trajectories_of(game([[1.0], [-1.0]]), game([[1.0, 0.0]]))
    together = advantages(trajectories, "reinforce_plus_plus")
    # Rewards 1, -1, and 1 and 0 with half the weight each.
    mean = (1 - 1 + 0.5) / 3
    assert together[0] / together[1] == pytest.approx((1 - mean) / (-1 - mean), rel=1e-4)


def test_metrics_have_the_mean_of_each_seat_and_leave_out_seats_without_reward() -> None:
    trajectories = trajectories_of(game([*REWARDS, [None, None]]))
    metrics = rollout_metrics(trajectories, success_threshold=1.0, weight_version=0)
    assert metrics["reward/seat_0/mean"] == 0.5
    assert metrics["reward/seat_1/mean"] == -0.5
    assert metrics["reward/mean"] == 0.0

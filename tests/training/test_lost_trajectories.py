"""Trajectories that infrastructure failed change no statistic: everything is as if they had not been started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import structs

from agent_loop.config import AlgorithmConfig
from agent_loop.rollout.batch import assemble
from agent_loop.training import metrics as names
from agent_loop.training.advantages.estimate import estimate_advantages, load_estimator
from agent_loop.training.advantages.rewards import collect_rewards
from agent_loop.training.evaluation.scores import summarise
from agent_loop.training.step_metrics import rollout_metrics
from agent_loop.trajectory import Failure, FailureKind, Trajectory
from tests.harness import examples
from tests.training.fakes import PAD, sample_trajectories, tiny_policy
from tests.training.samples import Rollout, groups, samples_of

ESTIMATORS = ["grpo", "rloo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"]
INFRASTRUCTURE = [kind for kind in FailureKind if kind is not FailureKind.CODE]
COUNTED = (names.STOP_REASON, names.INCIDENT, names.FAILURES, names.RETRIES)
"""Prefixes of the metrics that count lost trajectories."""
Name: TypeAlias = tuple[int, int, int | None]


def failed(trajectory: Trajectory, kind: FailureKind) -> Trajectory:
    output = trajectory.output.failed(Failure(error="Gone", traceback="", kind=kind))
    return structs.replace(trajectory, output=output, reward=None)


@st.composite
def losses(draw: st.DrawFn) -> tuple[list[Trajectory], list[Trajectory]]:
    """Return trajectories of which some are lost, and the others of them alone."""
    found: Sequence[Sequence[Rollout]] = draw(groups)
    trajectories = [sample.trajectory for sample in samples_of(found)]
    kinds = draw(
        st.lists(
            st.none() | st.sampled_from(INFRASTRUCTURE),
            min_size=len(trajectories),
            max_size=len(trajectories),
        )
    )
    assume(any(kind is None for kind in kinds))
    both = list(zip(trajectories, kinds, strict=True))
    return [t if kind is None else failed(t, kind) for t, kind in both], [t for t, kind in both if not kind]


def name_of(trajectory: Trajectory) -> Name:
    return trajectory.group, trajectory.rollout, trajectory.branch


def trained(trajectories: Sequence[Trajectory], estimator: Any) -> dict[Name, list[float]]:
    """Return the advantages of the tokens of the trajectories that are trained."""
    batch = assemble(trajectories, pad_token_id=PAD)
    config = AlgorithmConfig(adv_estimator=estimator, turn_reward_weight=0.5, drop_zero_variance_groups=False)
    found = estimate_advantages(
        collect_rewards(batch, config=config, response_length=99),
        estimator=load_estimator(config),
        values_BR=torch.zeros(batch["responses"].shape),
        baselines_B=0.25 * batch["group"].float(),
    )
    return {
        name_of(trajectory): found.advantages_BR[row][batch["response_mask"][row].bool()].tolist()
        for row, trajectory in enumerate(trajectories)
        if found.keep_B[row]
    }


@pytest.mark.parametrize("estimator", ESTIMATORS)
@examples(30)
@given(both=losses())
def test_lost_trajectories_are_in_no_baseline_and_get_no_advantage(
    estimator: str, both: tuple[list[Trajectory], list[Trajectory]]
) -> None:
    everything, kept = both
    found, expected = trained(everything, estimator), trained(kept, estimator)
    assert found.keys() == expected.keys()
    for name, advantages in expected.items():
        assert found[name] == pytest.approx(advantages, abs=1e-5)


@examples(100)
@given(both=losses())
def test_lost_trajectories_are_in_no_mean_and_no_share_of_the_metrics(
    both: tuple[list[Trajectory], list[Trajectory]],
) -> None:
    everything, kept = both
    found, expected = [
        rollout_metrics(trajectories, success_threshold=0.5, weight_version=3)
        for trajectories in (everything, kept)
    ]
    assert {name: value for name, value in found.items() if not name.startswith(COUNTED)} == pytest.approx(
        {name: value for name, value in expected.items() if not name.startswith(COUNTED)}
    )


def sampled_group(*rewards: float) -> list[Trajectory]:
    sampled = sample_trajectories(tiny_policy(), num_groups=1, n=len(rewards))
    return [structs.replace(t, reward=reward) for t, reward in zip(sampled, rewards, strict=True)]


def test_a_bug_counts_as_not_correct_and_an_outage_counts_as_nothing() -> None:
    right, wrong, lost = sampled_group(1.0, 0.0, 0.0)
    for kind in FailureKind:
        evaluation = summarise([right, wrong, failed(lost, kind)], success_threshold=1.0)
        is_counted = kind is FailureKind.CODE
        assert evaluation.scores.num_samples == (3 if is_counted else 2)
        assert evaluation.scores.pass_at_k[1].value == pytest.approx(1 / 3 if is_counted else 1 / 2)
        assert evaluation.scores.pass_at_k[2].value == pytest.approx(2 / 3 if is_counted else 1)
        assert evaluation.scores.mean_reward is not None
        assert evaluation.scores.mean_reward.value == 0.5
        assert evaluation.failures == {kind: 1}

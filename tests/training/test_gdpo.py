"""`gdpo` equals a reference in numpy that works on the parts of each trajectory's reward."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agent_loop.config import AlgorithmConfig, Config
from agent_loop.errors import ConfigError, DataError
from agent_loop.rollout.batch import assemble
from agent_loop.training.advantages.estimate import BatchAdvantages, estimate_batch, load_estimators
from agent_loop.training.rollouts import with_variance
from agent_loop.trajectory import Trajectory
from tests.harness import examples
from tests.training.fakes import PAD
from tests.training.samples import Branch, Rollout, Sample, Turn, compared, groups, samples_of, shares

WEIGHT = 0.3


def estimated(
    trajectories: Sequence[Trajectory], weights: Mapping[str, float], **config: Any
) -> BatchAdvantages:
    settings = AlgorithmConfig(adv_estimator="gdpo", reward_parts=dict(weights), **config)
    return estimate_batch(
        assemble(trajectories, pad_token_id=PAD), estimators=load_estimators(settings), response_length=99
    )


def trajectories_of(samples: Sequence[Sample]) -> list[Trajectory]:
    return [sample.trajectory for sample in samples]


def part_of(sample: Sample, name: str) -> float | None:
    if name != "reward":
        return sample.branch.parts.get(name)
    turns = [WEIGHT * float(np.float32(turn.reward or 0.0)) for turn in sample.turns]
    return sample.reward + sum(turns)


def reference(
    samples: Sequence[Sample], weights: Mapping[str, float], *, drops: bool
) -> tuple[dict[int, float], set[int]]:
    """Return the advantage of each scored row, and the rows with a signal."""
    scored = [row for row, sample in enumerate(samples) if sample.is_scored]
    sums, signal = dict.fromkeys(scored, 0.0), set[int]()
    for name, weight in weights.items():
        values = {row: part_of(samples[row], name) for row in scored}
        rows = [row for row in scored if values[row] is not None]
        numbers = [cast(float, values[row]) for row in rows]
        keys = [samples[row].group for row in rows]
        found = compared(numbers, keys=keys, weights=shares([samples[row].rollout for row in rows]))
        for row, value in zip(rows, found, strict=True):
            sums[row] += weight * value
            rivals = [n for n, key in zip(rows, keys, strict=True) if key == samples[row].group]
            has_rival = len({samples[n].rollout for n in rivals}) > 1
            if has_rival and len({values[n] for n in rivals}) > 1:
                signal.add(row)
    counted = [row for row in scored if row in signal or not drops]
    prompts = [(samples[row].trajectory.group, samples[row].trajectory.rollout) for row in counted]
    chosen, weight_N = np.array([sums[row] for row in counted]), np.array(shares(prompts))
    if not counted or chosen.min() == chosen.max():
        return dict.fromkeys(scored, 0.0), signal
    mean = (weight_N * chosen).sum() / weight_N.sum()
    variance = (weight_N * (chosen - mean) ** 2).sum() / max(weight_N.sum() - 1, 1)
    advantages = dict.fromkeys(scored, 0.0)
    advantages |= {row: float((sums[row] - mean) / np.sqrt(variance + 1e-8)) for row in counted}
    return advantages, signal


@pytest.mark.parametrize(
    "weights",
    [{"correct": 1.0}, {"correct": 1.0, "format": -0.4}, {"reward": 0.5, "format": 2.0}],
    ids=["one", "two", "reward"],
)
@examples(100)
@given(groups=groups, drops=st.booleans())
def test_each_part_is_normalized_in_its_group_and_the_sum_over_the_batch(
    weights: Mapping[str, float], groups: list[list[Rollout]], drops: bool
) -> None:
    samples = samples_of(groups)
    assume(any(set(sample.branch.parts) & set(weights) for sample in samples))
    turn_weight = WEIGHT if "reward" in weights else 0.0

    found = estimated(
        trajectories_of(samples), weights, drop_zero_variance_groups=drops, turn_reward_weight=turn_weight
    )

    expected, signal = reference(samples, weights, drops=drops)
    assert set(found.has_signal_B.nonzero().flatten().tolist()) == signal
    assert set(found.keep_B.nonzero().flatten().tolist()) == (signal if drops else set(expected))
    for row, value in expected.items():
        for start, _ in samples[row].spans:
            assert float(found.advantages_BR[row, start]) == pytest.approx(value, abs=1e-6)


def with_parts(*parts: Mapping[str, Any], reward: float = 1.0) -> list[Trajectory]:
    """Return one group with a rollout for each mapping."""
    return trajectories_of(
        samples_of([[Rollout((Branch(reward, (Turn(),), parts=each),)) for each in parts]])
    )


@pytest.mark.parametrize(
    ("parts", "weights", "is_kept"),
    [
        (({"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 0.0}), {"a": 1.0, "b": 1.0}, True),
        (({"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 1.0}), {"a": 1.0, "b": 1.0}, False),
        (({"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 2.0}), {"a": 1.0, "b": 0.0}, False),
        (({"a": 0.0}, {"b": 1.0}), {"a": 1.0, "b": 1.0}, False),
        (({"a": 0.0}, {"a": "text"}), {"a": 1.0}, False),
    ],
)
def test_dynamic_sampling_keeps_groups_in_which_a_part_with_a_weight_differs(
    parts: tuple[Mapping[str, Any], ...], weights: dict[str, float], is_kept: bool
) -> None:
    trajectories = with_parts(*parts)
    algorithm = AlgorithmConfig(adv_estimator="gdpo", reward_parts=weights)

    assert with_variance(trajectories, algorithm=algorithm) == (trajectories if is_kept else [])
    assert with_variance(trajectories, algorithm=AlgorithmConfig()) == []


@pytest.mark.parametrize("value", ["high", math.nan, math.inf, [1.0]])
def test_a_value_that_is_no_number_is_logged_and_left_out(
    value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = estimated(with_parts({"a": 1}, {"a": 0}, {"a": value}), {"a": 1.0})
    assert found.advantages_BR[2, 0] == 0
    assert "the reward part 'a' of group=0/rollout=2 is" in caplog.text


def test_a_part_that_no_row_has_is_an_error_that_names_it() -> None:
    with pytest.raises(DataError, match=r"algorithm\.reward_parts names corect, and no trajectory has"):
        estimated(with_parts({"correct": 1}, {"correct": 0}), {"corect": 1.0})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, r"algorithm\.reward_parts is empty; name the parts"),
        ({"reward_parts": {"a": 1}, "kl_reward_coef": 0.1}, "not among algorithm.reward_parts; add 'reward'"),
        ({"reward_parts": {"a": 1}, "overlong_buffer": 4}, "not among algorithm.reward_parts; add 'reward'"),
        (
            {"reward_parts": {"a": 1}, "turn_reward_weight": 1},
            "not among algorithm.reward_parts; add 'reward'",
        ),
    ],
)
def test_settings_that_would_have_no_effect_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Config.model_validate({"algorithm": {"adv_estimator": "gdpo", **changes}})

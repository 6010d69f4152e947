"""`turn_grpo` and `gigpo` equal a reference in numpy that works on trajectories, turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from agent_loop.config import AlgorithmConfig
from agent_loop.rollout.batch import assemble
from agent_loop.training.advantages.estimate import estimate_batch, load_estimators
from agent_loop.training.advantages.turns import collect_turns
from agent_loop.trajectory import AgentLoopOutput, Trajectory
from agent_loop.trajectory.attachments import Attachment
from tests.harness import examples
from tests.training.fakes import PAD
from tests.training.samples import (
    Branch,
    Rollout,
    Sample,
    Turn,
    batch_of,
    compared,
    groups,
    samples_of,
    shares,
)

WEIGHT = 0.3
KL = 1 / 16
"""Penalty of each trained token; exact in float32."""


def estimated(samples: Sequence[Sample], estimator: str, **config: Any) -> list[list[float]]:
    """Return the advantage of each token of each row."""
    settings = AlgorithmConfig(
        adv_estimator=estimator,
        turn_reward_weight=WEIGHT,
        drop_zero_variance_groups=False,
        kl_reward_coef=1.0,
        **config,
    )
    batch = batch_of(samples)
    found = estimate_batch(
        batch,
        estimators=load_estimators(settings),
        response_length=99,
        kl_BR=KL * batch["response_mask"],
    )
    assert torch.equal(found.keep_B, batch["is_scored"])
    return cast("list[list[float]]", found.advantages_BR.tolist())


def turn_rewards(sample: Sample) -> list[float]:
    rewards = [
        WEIGHT * float(np.float32(turn.reward or 0.0)) - (KL * turn.num_tokens if trained else 0.0)
        for trained, turn in zip(is_trained(sample), sample.turns, strict=True)
    ]
    if rewards:
        rewards[-1] += sample.reward
    return rewards


def is_trained(sample: Sample) -> list[bool]:
    return [number >= sample.num_untrained for number in range(len(sample.turns))]


def discounted(rewards: Sequence[float], gamma: float) -> list[float]:
    returns: list[float] = []
    for reward in reversed(rewards):
        returns.insert(0, reward + gamma * (returns[0] if returns else 0.0))
    return returns


def steps(
    samples: Sequence[Sample], *, gamma: float, anchor: Callable[[Sample, int], Hashable]
) -> dict[tuple[int, int], float]:
    """Return the advantage of each turn of each scored row."""
    rows = [row for row, sample in enumerate(samples) if sample.is_scored]
    places = [(row, turn) for row in rows for turn in range(len(samples[row].turns))]
    values = [discounted(turn_rewards(samples[row]), gamma)[turn] for row, turn in places]
    keys = [(samples[row].group, anchor(samples[row], turn)) for row, turn in places]
    branches: dict[Hashable, set[int]] = {}
    for (row, _), key in zip(places, keys, strict=True):
        branches.setdefault((samples[row].rollout, key), set()).add(row)
    weights = [
        1 / len(branches[samples[row].rollout, key]) for (row, _), key in zip(places, keys, strict=True)
    ]
    return dict(zip(places, compared(values, keys=keys, weights=weights), strict=True))


def of_tokens(
    samples: Sequence[Sample], values: dict[tuple[int, int], float]
) -> dict[tuple[int, int], float]:
    """Return the values of turns for each trained token."""
    return {
        (row, token): values[row, turn]
        for row, sample in enumerate(samples)
        if sample.is_scored
        for turn, (first, last) in enumerate(sample.spans)
        if turn >= sample.num_untrained
        for token in range(first, last + 1)
    }


def episodes(samples: Sequence[Sample]) -> dict[int, float]:
    rows = [row for row, sample in enumerate(samples) if sample.is_scored]
    totals = [sum(turn_rewards(samples[row])) if samples[row].turns else samples[row].reward for row in rows]
    found = compared(
        totals,
        keys=[samples[row].group for row in rows],
        weights=shares([samples[row].rollout for row in rows]),
    )
    return dict(zip(rows, found, strict=True))


def turn_number(sample: Sample, turn: int) -> Hashable:
    return turn


def observation(sample: Sample, turn: int) -> Hashable:
    return ("observation", sample.turns[turn].seen) if turn else "prompt"


def state(sample: Sample, turn: int) -> Hashable:
    known = sample.turns[turn - 1].state if turn else None
    return observation(sample, turn) if known is None else ("state", str(known))


def assert_equal(found: list[list[float]], expected: dict[tuple[int, int], float]) -> None:
    for (row, token), value in expected.items():
        assert found[row][token] == pytest.approx(value, abs=1e-6), (row, token)


@examples(150)
@given(groups=groups, gamma=st.sampled_from([1.0, 0.9]))
def test_a_turn_is_compared_with_the_same_turn_of_its_group(
    groups: list[list[Rollout]], gamma: float
) -> None:
    samples = samples_of(groups)
    expected = steps(samples, gamma=gamma, anchor=turn_number)
    assert_equal(estimated(samples, "turn_grpo", gamma=gamma), of_tokens(samples, expected))


@pytest.mark.parametrize(("state_key", "anchor"), [(None, observation), ("state", state)])
@examples(100)
@given(groups=groups, gamma=st.sampled_from([1.0, 0.9]), weight=st.sampled_from([0.0, 1.0, 0.4]))
def test_gigpo_adds_the_comparison_of_turns_in_the_same_state_to_that_of_trajectories(
    state_key: str | None,
    anchor: Callable[[Sample, int], Hashable],
    groups: list[list[Rollout]],
    gamma: float,
    weight: float,
) -> None:
    samples = samples_of(groups)
    totals, turns = episodes(samples), steps(samples, gamma=gamma, anchor=anchor)
    expected = {(row, turn): totals[row] + weight * value for (row, turn), value in turns.items()}

    found = estimated(samples, "gigpo", gamma=gamma, step_advantage_weight=weight, anchor_state=state_key)

    assert_equal(found, of_tokens(samples, expected))


def test_equal_placeholders_of_different_images_are_different_states() -> None:
    def with_image(digest: bytes) -> Trajectory:
        (sample,) = samples_of([[Rollout((Branch(1.0, (Turn(), Turn())),))]])
        output = sample.trajectory.output
        prompt, first, tool, last = output.segments
        image = Attachment("image", 0, 2, 6, {}, digest)
        segments = [prompt, first, structs.replace(tool, attachments=(image,)), last]
        return structs.replace(sample.trajectory, output=AgentLoopOutput(segments=segments))

    batch = assemble([with_image(digest) for digest in (b"a", b"b", b"a")], pad_token_id=PAD)
    first, second, third = cast("list[list[int]]", collect_turns(batch).states_BT.tolist())
    assert first == third
    assert first[0] == second[0]
    assert first[1] != second[1]

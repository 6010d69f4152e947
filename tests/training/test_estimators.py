"""Estimators equal references in numpy that work on trajectories, turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor

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
BASELINE = 0.25
"""Reward of the greedy rollout of a group, divided by its number."""
LAM = 0.8


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
        values_BR=values_like(batch["responses"]),
        baselines_B=BASELINE * batch["group"].float(),
    )
    assert torch.equal(found.keep_B, batch["is_scored"])
    if found.returns_BR is not None and not config.get("whiten_advantages", True):
        torch.testing.assert_close(found.returns_BR, found.advantages_BR + values_like(batch["responses"]))
    return cast("list[list[float]]", found.advantages_BR.tolist())


def values_like(tokens_BR: Tensor) -> Tensor:
    """Return values of a critic that depend on the column alone."""
    return torch.linspace(-1, 1, 64)[: tokens_BR.shape[1]].expand(tokens_BR.shape)


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


def rewarded_turns(samples: Sequence[Sample], *, norm_by_std: bool) -> dict[tuple[int, int], float]:
    """Return the rewards of trained turns of scored rows, compared within their groups."""
    places = [
        (row, turn)
        for row, sample in enumerate(samples)
        if sample.is_scored
        for turn in range(sample.num_untrained, len(sample.turns))
        if sample.turns[turn].reward is not None
    ]
    rollouts = {row: samples[row].rollout for row, _ in places}
    weights = [1 / list(rollouts.values()).count(rollouts[row]) for row, _ in places]
    values = [float(np.float32(samples[row].turns[turn].reward or 0.0)) for row, turn in places]
    keys = [samples[row].group for row, _ in places]
    found = compared(values, keys=keys, weights=weights, norm_by_std=norm_by_std, needs_others=False)
    return dict(zip(places, found, strict=True))


def grpo(samples: Sequence[Sample], gamma: float) -> dict[tuple[int, int], float]:
    rows = [row for row, sample in enumerate(samples) if sample.is_scored]
    outcomes = [samples[row].reward - KL * len(token_rewards(samples[row], outcome=0.0)) for row in rows]
    keys, rollouts = [samples[row].group for row in rows], [samples[row].rollout for row in rows]
    totals = dict(zip(rows, compared(outcomes, keys=keys, weights=shares(rollouts)), strict=True))
    turns = rewarded_turns(samples, norm_by_std=True)
    return of_tokens(
        samples,
        {
            (row, turn): totals[row]
            + WEIGHT * sum(value for place, value in turns.items() if place[0] == row and place[1] >= turn)
            for row in rows
            for turn in range(len(samples[row].turns))
        },
    )


def rloo(samples: Sequence[Sample], gamma: float) -> dict[tuple[int, int], float]:
    rows = [row for row, sample in enumerate(samples) if sample.is_scored]
    found: dict[tuple[int, int], float] = {}
    for row in rows:
        by_rollout: dict[Hashable, list[float]] = {}
        for other in (other for other in rows if samples[other].group == samples[row].group):
            by_rollout.setdefault(samples[other].rollout, []).append(total(samples[other]))
        differs = len({each for totals in by_rollout.values() for each in totals}) > 1
        by_rollout.pop(samples[row].rollout)
        others = [float(np.mean(totals)) for totals in by_rollout.values()]
        value = total(samples[row]) - float(np.mean(others)) if others and differs else 0.0
        found |= {(row, turn): value for turn in range(len(samples[row].turns))}
    return of_tokens(samples, found)


def remax(samples: Sequence[Sample], gamma: float) -> dict[tuple[int, int], float]:
    rows = [row for row, sample in enumerate(samples) if sample.is_scored]
    values = {row: total(samples[row]) - BASELINE * samples[row].trajectory.group for row in rows}
    places = [(row, turn) for row in rows for turn in range(len(samples[row].turns))]
    return of_tokens(samples, {place: values[place[0]] for place in places})


def total(sample: Sample) -> float:
    return sum(turn_rewards(sample)) if sample.turns else sample.reward


def token_rewards(
    sample: Sample, *, outcome: float, turns: Mapping[int, float] | None = None
) -> dict[int, float]:
    """Return the reward of each trained token. `turns` replaces the rewards of turns."""
    rewards: dict[int, float] = {}
    for number in range(sample.num_untrained, len(sample.turns)):
        first, last = sample.spans[number]
        rewards |= dict.fromkeys(range(first, last + 1), -KL)
        own = float(np.float32(sample.turns[number].reward or 0.0))
        rewards[last] += WEIGHT * (own if turns is None else turns.get(number, 0.0))
    if rewards:
        rewards[max(rewards)] += outcome
    return rewards


def reinforce_plus_plus(samples: Sequence[Sample], gamma: float) -> dict[tuple[int, int], float]:
    return whitened(
        samples,
        {
            row: discounted_tokens(token_rewards(sample, outcome=sample.reward), gamma)
            for row, sample in enumerate(samples)
            if sample.is_scored
        },
    )


def reinforce_plus_plus_baseline(samples: Sequence[Sample], gamma: float) -> dict[tuple[int, int], float]:
    rows = [row for row, sample in enumerate(samples) if sample.is_scored]
    keys, rollouts = [samples[row].group for row in rows], [samples[row].rollout for row in rows]
    rewards = [samples[row].reward for row in rows]
    centred = compared(rewards, keys=keys, weights=shares(rollouts), norm_by_std=False)
    turns = rewarded_turns(samples, norm_by_std=False)
    returns: dict[int, dict[int, float]] = {}
    for row, outcome in zip(rows, centred, strict=True):
        own = {turn: value for (of_row, turn), value in turns.items() if of_row == row}
        returns[row] = discounted_tokens(token_rewards(samples[row], outcome=outcome, turns=own), gamma)
    return whitened(samples, returns)


def gae(samples: Sequence[Sample], gamma: float) -> dict[tuple[int, int], float]:
    values = values_like(torch.zeros(1, 64))[0].tolist()
    found: dict[int, dict[int, float]] = {}
    for row, sample in enumerate(samples):
        if sample.is_scored:
            rewards = token_rewards(sample, outcome=sample.reward)
            later = [*list(rewards)[1:], None][: len(rewards)]
            deltas = {
                token: rewards[token] + (gamma * values[after] if after is not None else 0.0) - values[token]
                for token, after in zip(rewards, later, strict=True)
            }
            found[row] = discounted_tokens(deltas, gamma * LAM)
    return whitened(samples, found)


def discounted_tokens(rewards: Mapping[int, float], gamma: float) -> dict[int, float]:
    return dict(zip(rewards, discounted(list(rewards.values()), gamma), strict=True))


def whitened(
    samples: Sequence[Sample], values: Mapping[int, Mapping[int, float]]
) -> dict[tuple[int, int], float]:
    """Return whitened values of tokens. The tokens of a rollout with k trained rows have the weight 1 / k."""
    places = [(row, token) for row, tokens in values.items() for token in tokens]
    if not places:
        return {}
    trained = [row for row, tokens in values.items() if tokens]
    rollouts = {row: (samples[row].trajectory.group, samples[row].trajectory.rollout) for row in trained}
    weights = np.array([1 / list(rollouts.values()).count(rollouts[row]) for row, _ in places])
    numbers = np.array([values[row][token] for row, token in places])
    mean = (weights * numbers).sum() / weights.sum()
    variance = (weights * (numbers - mean) ** 2).sum() / max(weights.sum() - 1, 1)
    is_flat = numbers.min() == numbers.max()
    scaled = np.zeros_like(numbers) if is_flat else (numbers - mean) / np.sqrt(variance + 1e-8)
    return dict(zip(places, scaled.tolist(), strict=True))


REFERENCES = [grpo, rloo, remax, reinforce_plus_plus, reinforce_plus_plus_baseline, gae]


def assert_equal(
    found: list[list[float]], expected: dict[tuple[int, int], float], *, tolerance: float = 1e-6
) -> None:
    for (row, token), value in expected.items():
        assert found[row][token] == pytest.approx(value, abs=tolerance), (row, token)


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda each: each.__name__)
@examples(80)
@given(groups=groups, gamma=st.sampled_from([1.0, 0.9]))
def test_an_estimator_equals_its_reference(
    reference: Callable[[Sequence[Sample], float], dict[tuple[int, int], float]],
    groups: list[list[Rollout]],
    gamma: float,
) -> None:
    samples = samples_of(groups)
    found = estimated(samples, reference.__name__, gamma=gamma, lam=LAM)
    assert_equal(found, reference(samples, gamma), tolerance=2e-4)


@examples(20)
@given(groups=groups)
def test_a_critic_learns_the_advantages_before_whitening_plus_its_values(groups: list[list[Rollout]]) -> None:
    estimated(samples_of(groups), "gae", whiten_advantages=False)


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

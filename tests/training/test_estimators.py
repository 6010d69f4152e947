"""Estimators equal references in numpy that work on trajectories, turn by turn."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor

from agent_loop.config import AlgorithmConfig
from agent_loop.errors import DataError
from agent_loop.rollout.batch import assemble
from agent_loop.training.advantages.estimate import BatchAdvantages, estimate_batch, load_estimators
from agent_loop.training.advantages.turns import collect_turns
from agent_loop.training.rollouts import with_variance
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
OfTurns: TypeAlias = dict[tuple[int, int], float]
"""Values by row and turn."""
OfTokens: TypeAlias = dict[tuple[int, int], float]
"""Values by row and response token."""


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


def scored_rows(samples: Sequence[Sample]) -> list[int]:
    return [row for row, sample in enumerate(samples) if sample.is_scored]


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


def steps(samples: Sequence[Sample], *, gamma: float, anchor: Callable[[Sample, int], Hashable]) -> OfTurns:
    """Return the advantage of each turn of each scored row."""
    rows = scored_rows(samples)
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


def of_tokens(samples: Sequence[Sample], values: OfTurns) -> OfTokens:
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
    return within_groups(samples, {row: total(samples[row]) for row in scored_rows(samples)})


def within_groups(
    samples: Sequence[Sample], values: Mapping[int, float], *, norm_by_std: bool = True
) -> dict[int, float]:
    """Return values of rows, compared within their groups. A rollout counts once."""
    found = compared(
        list(values.values()),
        keys=[samples[row].group for row in values],
        weights=shares([samples[row].rollout for row in values]),
        norm_by_std=norm_by_std,
    )
    return dict(zip(values, found, strict=True))


def observation(sample: Sample, turn: int) -> Hashable:
    return ("observation", sample.turns[turn].seen) if turn else "prompt"


def state(sample: Sample, turn: int) -> Hashable:
    known = sample.turns[turn - 1].state if turn else None
    return observation(sample, turn) if known is None else ("state", str(known))


def rewarded_turns(samples: Sequence[Sample], *, norm_by_std: bool) -> OfTurns:
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


def grpo(samples: Sequence[Sample], gamma: float) -> OfTokens:
    rows = scored_rows(samples)
    penalties = {row: KL * len(token_rewards(samples[row], outcome=0.0)) for row in rows}
    totals = within_groups(samples, {row: samples[row].reward - penalties[row] for row in rows})
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


def rloo(samples: Sequence[Sample], gamma: float) -> OfTokens:
    rows = scored_rows(samples)
    found: OfTokens = {}
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


def remax(samples: Sequence[Sample], gamma: float) -> OfTokens:
    rows = scored_rows(samples)
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


def reinforce_plus_plus(samples: Sequence[Sample], gamma: float) -> OfTokens:
    return whitened(
        samples,
        {
            row: discounted_tokens(token_rewards(sample, outcome=sample.reward), gamma)
            for row, sample in enumerate(samples)
            if sample.is_scored
        },
    )


def reinforce_plus_plus_baseline(samples: Sequence[Sample], gamma: float) -> OfTokens:
    rewards = {row: samples[row].reward for row in scored_rows(samples)}
    turns = rewarded_turns(samples, norm_by_std=False)
    returns: dict[int, dict[int, float]] = {}
    for row, outcome in within_groups(samples, rewards, norm_by_std=False).items():
        own = {turn: value for (of_row, turn), value in turns.items() if of_row == row}
        returns[row] = discounted_tokens(token_rewards(samples[row], outcome=outcome, turns=own), gamma)
    return whitened(samples, returns)


def gae(samples: Sequence[Sample], gamma: float) -> OfTokens:
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


def whitened(samples: Sequence[Sample], values: Mapping[int, Mapping[int, float]]) -> OfTokens:
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


def turn_grpo(samples: Sequence[Sample], gamma: float) -> OfTokens:
    return of_tokens(samples, steps(samples, gamma=gamma, anchor=lambda sample, turn: turn))


REFERENCES = [grpo, rloo, remax, reinforce_plus_plus, reinforce_plus_plus_baseline, gae, turn_grpo]


def assert_equal(found: list[list[float]], expected: OfTokens, *, tolerance: float = 1e-6) -> None:
    for (row, token), value in expected.items():
        assert found[row][token] == pytest.approx(value, abs=tolerance), (row, token)


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda each: each.__name__)
@examples(80)
@example(groups=[[Rollout((Branch(1.0), Branch(0.0))), Rollout((Branch(0.5),))]], gamma=1.0)
@given(groups=groups, gamma=st.sampled_from([1.0, 0.9]))
def test_an_estimator_equals_its_reference(
    reference: Callable[[Sequence[Sample], float], OfTokens], groups: list[list[Rollout]], gamma: float
) -> None:
    samples = samples_of(groups)
    found = estimated(samples, reference.__name__, gamma=gamma, lam=LAM)
    assert_equal(found, reference(samples, gamma), tolerance=2e-4)


@examples(20)
@given(groups=groups)
def test_a_critic_learns_the_advantages_before_whitening_plus_its_values(groups: list[list[Rollout]]) -> None:
    estimated(samples_of(groups), "gae", whiten_advantages=False)


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


def test_gigpo_learns_from_turns_that_differ_in_trajectories_of_equal_reward() -> None:
    orders = [(1.0, 0.0), (0.0, 1.0)]
    rollouts = [Rollout((Branch(1.0, tuple(Turn(reward=reward) for reward in order)),)) for order in orders]
    settings = AlgorithmConfig(adv_estimator="gigpo", turn_reward_weight=1.0, gamma=0.5)
    found = estimate_batch(
        batch_of(samples_of([rollouts])), estimators=load_estimators(settings), response_length=99
    )
    assert found.has_signal_B.all()


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


# -- GDPO --------------------------------------------------------------------------------------------------------------


def gdpo(trajectories: Sequence[Trajectory], weights: Mapping[str, float], **config: Any) -> BatchAdvantages:
    settings = AlgorithmConfig(adv_estimator="gdpo", reward_parts=dict(weights), **config)
    batch = assemble(trajectories, pad_token_id=PAD)
    return estimate_batch(batch, estimators=load_estimators(settings), response_length=99)


def part_of(sample: Sample, name: str) -> float | None:
    if name != "reward":
        return sample.branch.parts.get(name)
    return sample.reward + sum(WEIGHT * float(np.float32(turn.reward or 0.0)) for turn in sample.turns)


def gdpo_reference(
    samples: Sequence[Sample], weights: Mapping[str, float], *, drops: bool
) -> tuple[dict[int, float], set[int]]:
    """Return the advantage of each scored row, and the rows with a signal."""
    scored = scored_rows(samples)
    sums, signal = dict.fromkeys(scored, 0.0), set[int]()
    for name, weight in weights.items():
        parts = {row: part_of(samples[row], name) for row in scored}
        values = {row: value for row, value in parts.items() if value is not None}
        for row, value in within_groups(samples, values).items():
            sums[row] += weight * value
            rivals = [other for other in values if samples[other].group == samples[row].group]
            has_rival = len({samples[other].rollout for other in rivals}) > 1
            if has_rival and len({values[other] for other in rivals}) > 1:
                signal.add(row)
    counted = {row: {0: sums[row]} for row in scored if row in signal or not drops}
    return dict.fromkeys(scored, 0.0) | {row: v for (row, _), v in whitened(samples, counted).items()}, signal


@pytest.mark.parametrize(
    "weights",
    [{"correct": 1.0}, {"correct": 1.0, "format": -0.4}, {"reward": 0.5, "format": 2.0}],
    ids=["one", "two", "reward"],
)
@examples(100)
@given(groups=groups, drops=st.booleans())
def test_gdpo_normalizes_each_part_in_its_group_and_the_sum_over_the_batch(
    weights: Mapping[str, float], groups: list[list[Rollout]], drops: bool
) -> None:
    samples = samples_of(groups)
    assume(any(set(sample.branch.parts) & set(weights) for sample in samples))
    turn_weight = WEIGHT if "reward" in weights else 0.0
    found = gdpo(
        [sample.trajectory for sample in samples],
        weights,
        drop_zero_variance_groups=drops,
        turn_reward_weight=turn_weight,
    )
    expected, signal = gdpo_reference(samples, weights, drops=drops)
    assert set(found.has_signal_B.nonzero().flatten().tolist()) == signal
    assert set(found.keep_B.nonzero().flatten().tolist()) == (signal if drops else set(expected))
    for row, value in expected.items():
        for start, _ in samples[row].spans:
            assert float(found.advantages_BR[row, start]) == pytest.approx(value, abs=1e-6)


def with_parts(*parts: Mapping[str, Any]) -> list[Trajectory]:
    """Return one group with a rollout for each mapping."""
    rollouts = [Rollout((Branch(1.0, (Turn(),), parts=each),)) for each in parts]
    return [sample.trajectory for sample in samples_of([rollouts])]


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


@pytest.mark.parametrize("value", ["high", math.nan, math.inf])
def test_a_part_that_is_no_number_is_logged_and_skipped(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = gdpo(with_parts({"a": 1}, {"a": 0}, {"a": value}), {"a": 1.0})
    assert found.advantages_BR[2, 0] == 0
    assert "the reward part 'a' of group=0/rollout=2 is" in caplog.text


def test_a_part_that_no_row_has_is_an_error_that_names_it() -> None:
    with pytest.raises(DataError, match=r"algorithm\.reward_parts names corect, and no trajectory has"):
        gdpo(with_parts({"correct": 1}, {"correct": 0}), {"corect": 1.0})

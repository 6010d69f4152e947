"""Every statistic counts a rollout once. The references work on rollouts, not on rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor

from agent_loop.config import ActorConfig, AggregationMode, AlgorithmConfig
from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.training.actor import Actor
from agent_loop.training.advantages.estimate import estimate_advantages, load_estimator
from agent_loop.training.advantages.groups import (
    has_signal,
    rollouts_of_rows,
)
from agent_loop.training.advantages.rewards import collect_rewards
from agent_loop.training.losses.terms import Aggregation
from agent_loop.training.rollouts import with_variance
from agent_loop.training.step_metrics import rollout_metrics
from agent_loop.trajectory import AgentLoopOutput, Failure, Feedback, Segment, Trajectory
from agent_loop.types import Origin, StopReason, as_token_ids
from tests.harness import examples
from tests.training.fakes import PAD, tiny_policy

WEIGHT = 0.5
ESTIMATORS = ["grpo", "rloo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"]
MODES: list[AggregationMode] = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@dataclass(frozen=True)
class Branch:
    reward: float | None
    turns: tuple[tuple[int, float | None], ...]
    """Number of tokens and reward of each turn."""

    @property
    def num_tokens(self) -> int:
        return sum(length for length, _ in self.turns)

    @property
    def total(self) -> float:
        assert self.reward is not None
        return self.reward + WEIGHT * sum(reward or 0.0 for _, reward in self.turns)

    def token_rewards(self, *, outcome: float, turn_mean: float = 0.0) -> list[float]:
        rewards: list[float] = []
        for length, reward in self.turns:
            rewards += [0.0] * (length - 1)
            rewards.append(0.0 if reward is None else WEIGHT * (reward - turn_mean))
        rewards[-1] += outcome
        return rewards


Rollout: TypeAlias = list[Branch]
Group: TypeAlias = list[Rollout]

values = st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0])
turns = st.lists(st.tuples(st.integers(1, 3), st.none() | values), min_size=1, max_size=3).map(tuple)
branches = st.builds(Branch, reward=st.none() | values, turns=turns)
groups = st.lists(
    st.lists(st.lists(branches, min_size=1, max_size=4), min_size=1, max_size=4), min_size=1, max_size=3
)


def trajectories_of(groups: Sequence[Group]) -> list[Trajectory]:
    return [
        trajectory(branch, group=g, rollout=r, number=b if len(rollout) > 1 else None)
        for g, group in enumerate(groups)
        for r, rollout in enumerate(group)
        for b, branch in enumerate(rollout)
    ]


def trajectory(branch: Branch, *, group: int, rollout: int, number: int | None) -> Trajectory:
    segments = [Segment(as_token_ids([3, 4]), Origin.PROMPT)]
    feedback: list[Feedback] = []
    index = -1
    for length, reward in branch.turns:
        logprobs = np.full(length, -1.0, np.float32)
        segments += [
            Segment(as_token_ids([5] * length), Origin.MODEL, logprobs, 0),
            Segment(as_token_ids([6]), Origin.TOOL),
        ]
        index += length
        if reward is not None:
            feedback.append(Feedback(Origin.TOOL, "tool", place=index, reward=reward))
        index += 1
    return Trajectory(
        AgentLoopOutput(segments=segments, feedback=feedback),
        row={},
        group=group,
        rollout=rollout,
        reward=branch.reward,
        reward_extra={},
        branch=number,
    )


def batch_of(groups: Sequence[Group]) -> RolloutBatch:
    return assemble(trajectories_of(groups), pad_token_id=PAD)


def estimated(
    groups: Sequence[Group], estimator: Any, **config: Any
) -> dict[tuple[int, int, int], list[float]]:
    """Return the advantage of each token of the trained branches, by group, rollout and branch."""
    batch = batch_of(groups)
    settings = AlgorithmConfig(
        adv_estimator=estimator, turn_reward_weight=WEIGHT, drop_zero_variance_groups=False, **config
    )
    rewards = collect_rewards(batch, config=settings, response_length=99)
    found = estimate_advantages(
        rewards,
        estimator=load_estimator(settings),
        values_BR=torch.zeros(batch["responses"].shape),
        baselines_B=0.25 * batch["group"].float(),
    )
    names = [
        (g, r, b)
        for g, group in enumerate(groups)
        for r, rollout in enumerate(group)
        for b, _ in enumerate(rollout)
    ]
    return {
        name: found.advantages_BR[row][batch["response_mask"][row].bool()].tolist()
        for row, name in enumerate(names)
        if found.keep_B[row]
    }


# -- references: they work on groups of rollouts of branches --------------------------------------------------------


def scored(rollout: Rollout) -> Rollout:
    return [branch for branch in rollout if branch.reward is not None]


def mean_of_rollouts(rollouts: Sequence[Sequence[float]]) -> float:
    return statistics.mean(statistics.mean(each) for each in rollouts)


def deviation_of_rollouts(rollouts: Sequence[Sequence[float]]) -> float:
    mean = mean_of_rollouts(rollouts)
    squares = [statistics.mean((value - mean) ** 2 for value in each) for each in rollouts]
    return math.sqrt(sum(squares) / (len(squares) - 1))


def rewards_differ(rollouts: Sequence[Sequence[float]]) -> bool:
    return len(rollouts) > 1 and len({value for each in rollouts for value in each}) > 1


def turn_weights(group: Group) -> list[tuple[float, float]]:
    """Return each turn reward of the group with its weight."""
    found: list[tuple[float, float]] = []
    for rollout in group:
        rewarded = [[r for _, r in branch.turns if r is not None] for branch in scored(rollout)]
        rewarded = [each for each in rewarded if each]
        found += [(reward, 1 / len(rewarded)) for each in rewarded for reward in each]
    return found


def reference_grpo(group: Group, branch: Branch) -> list[float]:
    rollouts = [[b.reward for b in scored(rollout)] for rollout in group if scored(rollout)]
    outcome = 0.0
    if rewards_differ(rollouts):
        outcome = (branch.reward - mean_of_rollouts(rollouts)) / (deviation_of_rollouts(rollouts) + 1e-6)
    weighted = turn_weights(group)
    count = sum(weight for _, weight in weighted)
    tokens = [0.0] * branch.num_tokens
    if len({reward for reward, _ in weighted}) > 1:
        mean = sum(reward * weight for reward, weight in weighted) / count
        variance = sum(weight * (reward - mean) ** 2 for reward, weight in weighted) / max(1.0, count - 1)
        index = -1
        for length, reward in branch.turns:
            index += length
            if reward is not None:
                tokens[index] = (reward - mean) / (math.sqrt(variance) + 1e-6)
    return [outcome + WEIGHT * sum(tokens[index:]) for index in range(len(tokens))]


def reference_rloo(group: Group, rollout: Rollout, branch: Branch) -> list[float]:
    rollouts = [[b.total for b in scored(each)] for each in group if scored(each)]
    others = [[b.total for b in scored(each)] for each in group if scored(each) and each is not rollout]
    value = branch.total - mean_of_rollouts(others) if rewards_differ(rollouts) else 0.0
    return [value] * branch.num_tokens


def whitened(rollouts: Sequence[Sequence[Sequence[float]]]) -> list[list[list[float]]]:
    """Return the whitened values of rollouts of branches of tokens.

    A token of a rollout with k branches has the weight 1 / k.
    """
    weighted = [(value, 1 / len(rollout)) for rollout in rollouts for branch in rollout for value in branch]
    count = sum(weight for _, weight in weighted)
    mean = sum(value * weight for value, weight in weighted) / count
    variance = sum(weight * (value - mean) ** 2 for value, weight in weighted) / max(1.0, count - 1)
    is_flat = len({value for value, _ in weighted}) == 1
    scale = 0.0 if is_flat else 1 / math.sqrt(variance + 1e-8)
    return [[[(value - mean) * scale for value in branch] for branch in rollout] for rollout in rollouts]


def reference_returns(groups: Sequence[Group], *, is_centred: bool) -> list[list[list[float]]]:
    returns: list[list[list[float]]] = []
    for group in groups:
        rollouts = [[b.reward for b in scored(each)] for each in group if scored(each)]
        weighted = turn_weights(group)
        mean = mean_of_rollouts(rollouts) if rollouts else 0.0
        count = sum(weight for _, weight in weighted)
        turn_mean = sum(reward * weight for reward, weight in weighted) / count if weighted else 0.0
        compares = rewards_differ(rollouts)
        compares_turns = len({reward for reward, _ in weighted}) > 1
        for rollout in group:
            if not scored(rollout):
                continue
            of_branches: list[list[float]] = []
            for branch in scored(rollout):
                outcome = branch.reward or 0.0
                if is_centred:
                    outcome = outcome - mean if compares else 0.0
                shown = branch
                if is_centred and not compares_turns:
                    shown = Branch(branch.reward, tuple((length, None) for length, _ in branch.turns))
                rewards = shown.token_rewards(outcome=outcome, turn_mean=turn_mean if is_centred else 0.0)
                of_branches.append([sum(rewards[index:]) for index in range(len(rewards))])
            returns.append(of_branches)
    return returns


def reference(groups: Sequence[Group], estimator: str) -> dict[tuple[int, int, int], list[float]]:
    names = [
        [(g, r, b) for b, branch in enumerate(rollout) if branch.reward is not None]
        for g, group in enumerate(groups)
        for r, rollout in enumerate(group)
        if scored(rollout)
    ]
    if estimator in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"):
        if not names:
            return {}
        found = whitened(reference_returns(groups, is_centred=estimator == "reinforce_plus_plus_baseline"))
        return {
            name: tokens
            for of_rollout, rollout in zip(names, found, strict=True)
            for name, tokens in zip(of_rollout, rollout, strict=True)
        }
    advantages: dict[tuple[int, int, int], list[float]] = {}
    for name in (name for of_rollout in names for name in of_rollout):
        group, rollout = groups[name[0]], groups[name[0]][name[1]]
        branch = rollout[name[2]]
        if estimator == "grpo":
            advantages[name] = reference_grpo(group, branch)
        elif estimator == "rloo":
            advantages[name] = reference_rloo(group, rollout, branch)
        else:
            advantages[name] = [branch.total - 0.25 * name[0]] * branch.num_tokens
    return advantages


def assert_same(found: Mapping[Any, Sequence[float]], expected: Mapping[Any, Sequence[float]]) -> None:
    assert found.keys() == expected.keys()
    for name, advantages in expected.items():
        assert found[name] == pytest.approx(advantages, abs=2e-4, rel=1e-4)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@examples(40)
@given(groups=groups)
def test_an_estimator_matches_a_reference_that_works_on_rollouts(estimator: str, groups: list[Group]) -> None:
    assert_same(estimated(groups, estimator), reference(groups, estimator))


def test_the_reward_of_a_shared_turn_counts_in_the_total_of_each_branch() -> None:
    """The total rewards of the rollouts are equal, with one branch or with two."""
    alone = trajectory(Branch(0.0, ((2, 1.0), (1, None))), group=0, rollout=0, number=None)
    first = trajectory(Branch(0.0, ((2, 1.0), (1, None))), group=0, rollout=1, number=0)
    shared = first.output.segments[:3]
    rest = trajectory(Branch(0.0, ((2, 1.0), (1, None))), group=0, rollout=1, number=1)
    output = AgentLoopOutput(segments=[*shared, *rest.output.segments[3:]], feedback=rest.output.feedback)
    second = structs.replace(rest, output=output)
    batch = assemble([alone, first, second], pad_token_id=PAD)
    config = AlgorithmConfig(adv_estimator="rloo", turn_reward_weight=WEIGHT)

    rewards = collect_rewards(batch, config=config, response_length=99)

    assert not batch["response_mask"][2, :2].any()
    assert rewards.per_row().tolist() == [0.5, 0.5, 0.5]
    assert not has_signal(rewards.per_row(), groups_B=rewards.groups_B, rollouts_B=rewards.rollouts_B).any()


def test_a_rollout_without_a_token_to_train_still_counts_with_its_reward() -> None:
    empty = Trajectory(
        AgentLoopOutput(segments=[Segment(as_token_ids([3]), Origin.PROMPT)]),
        row={},
        group=0,
        rollout=1,
        reward=-1.0,
        reward_extra={},
    )
    spoken = trajectory(Branch(1.0, ((2, None),)), group=0, rollout=0, number=None)
    config = AlgorithmConfig(adv_estimator="rloo")

    rewards = collect_rewards(assemble([spoken, empty], pad_token_id=PAD), config=config, response_length=99)

    assert rewards.per_row().tolist() == [1.0, -1.0]


# -- losses -----------------------------------------------------------------------------------------------------------


def split_into_rows(
    values: Sequence[Sequence[float]], rollouts: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    width = max(map(len, values))
    values_BT = torch.tensor(
        [[*row, *[math.nan] * (width - len(row))] for row in values], dtype=torch.float64
    )
    return values_BT, (~values_BT.isnan()).long(), torch.tensor(rollouts)


def reference_loss(rollouts: Sequence[Sequence[float]], mode: AggregationMode, *, length: int) -> float:
    """Return the loss over all tokens of each rollout."""
    if mode == "token-mean":
        return sum(map(sum, rollouts)) / sum(map(len, rollouts))
    if mode == "seq-mean-token-mean":
        return statistics.mean(map(statistics.mean, rollouts))
    return statistics.mean(sum(rollout) / length for rollout in rollouts)


@pytest.mark.parametrize("mode", MODES)
@examples(40)
@given(data=st.data())
def test_the_loss_of_a_rollout_does_not_depend_on_its_split_into_rows(
    mode: AggregationMode, data: st.DataObject
) -> None:
    tokens = st.lists(st.floats(-3, 3), min_size=1, max_size=6)
    rollouts = data.draw(st.lists(tokens, min_size=1, max_size=5))
    rows: list[tuple[int, list[float]]] = []
    for number, rollout in enumerate(rollouts):
        cuts = sorted(data.draw(st.sets(st.integers(1, 5), max_size=3)) & set(range(1, len(rollout))))
        for start, end in zip([0, *cuts], [*cuts, len(rollout)], strict=True):
            rows.append((number, rollout[start:end]))
    rows = data.draw(st.permutations(rows))
    values_BT, mask_BT, rollouts_B = split_into_rows([row for _, row in rows], [number for number, _ in rows])
    numbers = torch.arange(len(rows))
    reduce = Aggregation.of_rows(mask_BT, rows=numbers, rollouts_B=rollouts_B, mode=mode, length=7)
    parts = [part for part in numbers.tensor_split(3) if len(part)]

    whole = reduce(values_BT, mask_BT=mask_BT)
    in_parts = sum(float(reduce.cut(part)(values_BT[part], mask_BT=mask_BT[part])) for part in parts)

    expected = reference_loss(rollouts, mode, length=7)
    assert float(whole) == pytest.approx(expected, abs=1e-9)
    assert in_parts == pytest.approx(expected, abs=1e-9)


def mini_batches(config: ActorConfig, *, rows: Tensor, rollouts_B: Tensor | None) -> list[list[int]]:
    actor = Actor(tiny_policy(), config=config)
    return [part.tolist() for part in actor.optimizer.mini_batches(rows, rollouts_B=rollouts_B)]


def test_the_branches_of_a_rollout_are_in_one_mini_batch() -> None:
    config = ActorConfig(ppo_mini_batches=3, ppo_epochs=2)
    rows = torch.tensor([0, 1, 2, 4, 5, 6, 7, 9])
    rollouts_B = torch.tensor([0, 0, 1, 1, 1, 2, 3, 3, 4, 4])

    found = mini_batches(config, rows=rows, rollouts_B=rollouts_B)

    assert len(found) == 6
    for epoch in (found[:3], found[3:]):
        assert sorted(row for part in epoch for row in part) == rows.tolist()
        of_parts = [{int(rollouts_B[row]) for row in part} for part in epoch]
        assert sum(map(len, of_parts)) == len(set().union(*of_parts)) == 5


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_count_a_rollout_once() -> None:
    turns = ((1, None),)
    group: Group = [[Branch(1.0, turns)], [Branch(0.0, turns)] * 3, [Branch(None, turns), Branch(0.5, turns)]]
    trajectories = trajectories_of([group])
    trajectories[-2] = structs.replace(
        trajectories[-2], output=trajectories[-2].output.failed(Failure(error="Boom", traceback=""))
    )

    metrics = rollout_metrics(trajectories, success_threshold=1.0, weight_version=0)

    assert metrics["reward/mean"] == pytest.approx(0.5)
    assert metrics["reward/success_share"] == pytest.approx(1 / 3)
    assert metrics["rollout/unscored_share"] == 0
    assert metrics[f"rollout/stop_reason/{StopReason.FAILED}"] == pytest.approx(1 / 6)
    assert metrics[f"rollout/stop_reason/{StopReason.ANSWERED}"] == pytest.approx(5 / 6)


# -- selection of rows ------------------------------------------------------------------------------------------------


def scores(*rollouts: Sequence[float | None]) -> list[Trajectory]:
    return trajectories_of([[[Branch(reward, ((1, None),)) for reward in rollout] for rollout in rollouts]])


@pytest.mark.parametrize(
    ("rollouts", "is_kept"),
    [
        ([[1.0], [0.0, 0.0]], True),
        ([[1.0], [1.0, 1.0, 1.0]], False),
        ([[1.0, 0.0], [0.5, 0.5]], True),
        ([[1.0, 0.0], [None]], False),
        ([[1.0, None], [0.0]], True),
    ],
)
def test_a_group_is_kept_if_its_rollouts_have_different_rewards(
    rollouts: list[list[float | None]], is_kept: bool
) -> None:
    trajectories = scores(*rollouts)
    batch = assemble(trajectories, pad_token_id=PAD)
    signal_B = has_signal(batch["reward"], groups_B=batch["group"], rollouts_B=rollouts_of_rows(batch))

    kept = with_variance(trajectories, algorithm=AlgorithmConfig())

    assert kept == (trajectories if is_kept else [])
    assert signal_B.any() == is_kept

"""What estimates and metrics count: observations, limits, sources, seats, branches, lost trajectories and forks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor

from agent_loop.config import AlgorithmConfig, Config
from agent_loop.errors import ConfigError
from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.rollout.forks import FORKED_TURN
from agent_loop.training import metrics as names
from agent_loop.training.advantages.estimate import (
    BatchAdvantages,
    check_groups,
    estimate_advantages,
    estimate_batch,
    load_estimator,
    load_estimators,
)
from agent_loop.training.advantages.groups import has_signal, rollouts_of_rows
from agent_loop.training.advantages.rewards import collect_rewards, overlong_penalty
from agent_loop.training.advantages.turns import discounted_returns, gae
from agent_loop.training.evaluation.scores import summarise
from agent_loop.training.rollouts import with_variance
from agent_loop.training.step_metrics import rollout_metrics, source_metrics
from agent_loop.trajectory import Failure, FailureKind, Trajectory
from agent_loop.types import Origin, StopReason
from tests.harness import examples
from tests.training.fakes import PAD, sample_trajectories, tiny_policy
from tests.training.samples import Branch, Rollout, Turn, batch_of, groups, output_of, samples_of

Groups: TypeAlias = Sequence[Sequence[Rollout]]


def trajectories_of(groups: Groups) -> list[Trajectory]:
    return [sample.trajectory for sample in samples_of(groups)]


def estimate(batch: RolloutBatch, *, limit: int = 99, **options: Any) -> BatchAdvantages:
    """Return the advantages by an estimator; options are settings of the algorithm, or inputs of the estimator."""
    inputs = {
        name: options.pop(name) for name in ("is_allowed_B", "values_BR", "baselines_B") if name in options
    }
    config = AlgorithmConfig(**options)
    rewards = collect_rewards(batch, config=config, response_length=limit)
    return estimate_advantages(rewards, estimator=load_estimator(config), **inputs)


@examples(60)
@given(st.data())
def test_observations_between_turns_change_no_return(data: st.DataObject) -> None:
    masks = data.draw(st.lists(st.booleans(), min_size=1, max_size=12))
    garbage = data.draw(st.sampled_from([math.nan, math.inf, 7.0]))
    mask_BR = torch.tensor([masks])
    generator = torch.Generator().manual_seed(len(masks))
    rewards_BR, values_BR = (torch.randn(1, len(masks), generator=generator) for _ in range(2))

    def with_garbage(values_BR: Tensor) -> Tensor:
        return torch.where(mask_BR, values_BR, garbage)

    options: dict[str, Any] = {"gamma": 0.9, "lam": 0.7}
    found_BR = gae(with_garbage(rewards_BR), values_BR=with_garbage(values_BR), mask_BR=mask_BR, **options)
    compact_BR = gae(
        rewards_BR[mask_BR][None],
        values_BR=values_BR[mask_BR][None],
        mask_BR=torch.ones(1, int(mask_BR.sum())),
        **options,
    )
    assert torch.equal(found_BR[mask_BR], compact_BR[0])
    assert not found_BR[~mask_BR].any()
    returns_BR = discounted_returns(with_garbage(rewards_BR), mask_BR=mask_BR, gamma=0.9)
    rewards = rewards_BR[mask_BR].tolist()
    naive = [sum(0.9**k * reward for k, reward in enumerate(rewards[t:])) for t in range(len(rewards))]
    assert returns_BR[mask_BR].tolist() == pytest.approx(naive)


def test_the_length_penalty_rises_over_the_buffer_and_counts_in_the_outcome(batch: RolloutBatch) -> None:
    few_B = torch.tensor([0, 8, 9, 10, 12, 13])
    assert overlong_penalty(few_B, limit=12, buffer=4).tolist() == [0, 0, 0.25, 0.5, 1, 1]
    config = AlgorithmConfig(overlong_buffer=8, overlong_penalty=2.0)
    shaped_B = collect_rewards(batch, config=config, response_length=12).outcome_B
    lengths_B = batch["attention_mask"][:, batch["prompts"].shape[1] :].sum(dim=1)
    expected_B = batch["reward"] - 2.0 * ((lengths_B - 4) / 8).clamp(0, 1)
    torch.testing.assert_close(shaped_B, expected_B, equal_nan=True)
    assert (lengths_B > 4).any()


def test_rows_that_are_not_trainable_still_count_in_their_group(batch: RolloutBatch) -> None:
    free = estimate(batch)
    is_allowed_B = torch.arange(len(batch)) != int(free.keep_B.nonzero()[0])
    bound = estimate(batch, is_allowed_B=is_allowed_B)
    assert torch.equal(free.advantages_BR, bound.advantages_BR)
    assert torch.equal(bound.keep_B, free.keep_B & is_allowed_B)


RUN: dict[str, Any] = {"adv_estimator": "grpo", "turn_reward_weight": 0.5}
SOURCES: dict[str, dict[str, Any]] = {
    "math": {"adv_estimator": "rloo", "overlong_buffer": 4},
    "code": {"adv_estimator": "turn_grpo", "gamma": 0.9, "turn_reward_weight": 1.0},
}


@examples(60)
@given(groups=groups)
def test_each_source_has_the_advantages_that_it_has_alone(groups: Groups) -> None:
    samples = samples_of(groups)
    batch = batch_of(samples)

    def estimated(rows: list[int], **algorithm: Any) -> BatchAdvantages:
        return estimate_batch(
            batch[torch.tensor(rows, dtype=torch.int64)],
            estimators=load_estimators(AlgorithmConfig(**algorithm)),
            response_length=9,
            kl_BR=(batch["response_mask"] / 16)[rows],
            is_allowed_B=torch.tensor([row % 5 != 0 for row in rows], dtype=torch.bool),
        )

    found = estimated(list(range(len(samples))), **RUN, by_data_source=SOURCES)
    for source in (None, "math", "code"):
        rows = [n for n, sample in enumerate(samples) if sample.trajectory.row.get("data_source") == source]
        alone = estimated(rows, **{**RUN, **SOURCES.get(source or "", {})})
        assert torch.equal(found.advantages_BR[rows], alone.advantages_BR)
        assert torch.equal(found.keep_B[rows], alone.keep_B)
        assert torch.equal(found.has_signal_B[rows], alone.has_signal_B)


@pytest.mark.parametrize(
    ("run", "source"), [("grpo", "gae"), ("grpo", "remax"), ("gae", "grpo"), ("remax", "rloo")]
)
def test_a_source_cannot_need_other_models_or_rollouts_than_the_run(run: str, source: str) -> None:
    config = AlgorithmConfig(adv_estimator=run, by_data_source={"math": {"adv_estimator": source}})
    with pytest.raises(ConfigError, match=f"math.adv_estimator is {source}, and algorithm.adv_estimator"):
        load_estimators(config)


def test_groups_of_one_are_refused_before_the_model_is_loaded() -> None:
    algorithm = {"adv_estimator": "reinforce_plus_plus", "by_data_source": {"a": {"adv_estimator": "rloo"}}}
    config = Config.model_validate(
        {"model": {"path": "/missing"}, "rollout": {"n": 1}, "algorithm": algorithm}
    )
    with pytest.raises(ConfigError, match=r"rollout\.n is 1, but .*by_data_source\.a\.adv_estimator=rloo"):
        check_groups(config)


@examples(100)
@given(groups=groups)
def test_sources_have_the_metrics_of_their_rollouts(groups: Groups) -> None:
    trajectories = trajectories_of(groups)
    rewards: defaultdict[Any, defaultdict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
    for t in trajectories:
        rewards[t.row.get("data_source")][t.group, t.rollout].extend([] if t.reward is None else [t.reward])
    expected: dict[str, float] = {}
    sources = [source for source in rewards if source is not None]
    for source in sources:
        scored = [each for each in rewards[source].values() if each]
        num_successes = sum(max(each) >= 0.5 for each in scored)
        expected[f"by_source/{source}/rollouts"] = len(rewards[source])
        expected[f"by_source/{source}/reward/success_share"] = num_successes / len(rewards[source])
        if scored:
            expected[f"by_source/{source}/reward/mean"] = float(np.mean([np.mean(each) for each in scored]))
    found = source_metrics(trajectories, sources=sources, success_threshold=0.5)
    assert found == pytest.approx(expected)


def test_metrics_have_the_mean_of_each_seat_and_leave_out_seats_without_reward() -> None:
    rewards = [[1.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [None, None]]
    game = [Rollout(tuple(Branch(each, seat=seat) for seat, each in enumerate(seats))) for seats in rewards]
    metrics = rollout_metrics(trajectories_of([game]), success_threshold=1.0, weight_version=0)
    assert metrics["reward/seat_0/mean"] == 0.5
    assert metrics["reward/seat_1/mean"] == -0.5
    assert metrics["reward/mean"] == 0.0


def branches(*rollouts: Sequence[float | None]) -> list[Trajectory]:
    """Return the branches of the rollouts of one group with these rewards."""
    return trajectories_of([[Rollout(tuple(map(Branch, rewards))) for rewards in rollouts]])


def failed(trajectory: Trajectory, kind: FailureKind = FailureKind.CODE) -> Trajectory:
    output = trajectory.output.failed(Failure(error="Gone", traceback="", kind=kind))
    return structs.replace(trajectory, output=output, reward=None)


def test_metrics_count_a_rollout_once() -> None:
    trajectories = branches([1.0], [0.0, 0.0, 0.0], [None, 0.5])
    trajectories[-2] = failed(trajectories[-2])
    metrics = rollout_metrics(trajectories, success_threshold=1.0, weight_version=0)
    assert metrics["reward/mean"] == pytest.approx(0.5)
    assert metrics["reward/success_share"] == pytest.approx(1 / 3)
    assert metrics["rollout/unscored_share"] == 0
    assert metrics[f"rollout/stop_reason/{StopReason.FAILED}"] == pytest.approx(1 / 6)
    assert metrics[f"rollout/stop_reason/{StopReason.ANSWERED}"] == pytest.approx(5 / 6)


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
def test_groups_with_different_rewards_are_kept(rollouts: list[list[float | None]], is_kept: bool) -> None:
    trajectories = branches(*rollouts)
    batch = assemble(trajectories, pad_token_id=PAD)
    signal_B = has_signal(batch["reward"], groups_B=batch["group"], rollouts_B=rollouts_of_rows(batch))
    kept = with_variance(trajectories, algorithm=AlgorithmConfig())
    assert kept == (trajectories if is_kept else [])
    assert signal_B.any() == is_kept


INFRASTRUCTURE = [kind for kind in FailureKind if kind is not FailureKind.CODE]
COUNTED = (names.STOP_REASON, names.INCIDENT, names.FAILURES, names.RETRIES)
"""Prefixes of the metrics that count lost trajectories."""


@st.composite
def losses(draw: st.DrawFn) -> tuple[list[Trajectory], list[Trajectory]]:
    """Return trajectories of which some are lost, and the others of them alone."""
    trajectories = trajectories_of(draw(groups))
    kind = st.none() | st.sampled_from(INFRASTRUCTURE)
    kinds = draw(st.lists(kind, min_size=len(trajectories), max_size=len(trajectories)))
    assume(any(kind is None for kind in kinds))
    both = list(zip(trajectories, kinds, strict=True))
    return [t if kind is None else failed(t, kind) for t, kind in both], [t for t, kind in both if not kind]


def trained(trajectories: Sequence[Trajectory], estimator: Any) -> dict[tuple[Any, ...], list[float]]:
    """Return the advantages of the tokens of the trajectories that are trained, by group, rollout and branch."""
    batch = assemble(trajectories, pad_token_id=PAD)
    found = estimate(
        batch,
        adv_estimator=estimator,
        turn_reward_weight=0.5,
        drop_zero_variance_groups=False,
        values_BR=torch.zeros(batch["responses"].shape),
        baselines_B=0.25 * batch["group"].float(),
    )
    return {
        (t.group, t.rollout, t.branch): found.advantages_BR[row][batch["response_mask"][row].bool()].tolist()
        for row, t in enumerate(trajectories)
        if found.keep_B[row]
    }


@pytest.mark.parametrize(
    "estimator", ["grpo", "rloo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"]
)
@examples(30)
@given(both=losses())
def test_lost_trajectories_are_in_no_baseline_and_get_no_advantage(
    estimator: str, both: tuple[list[Trajectory], list[Trajectory]]
) -> None:
    found, expected = (trained(each, estimator) for each in both)
    assert found.keys() == expected.keys()
    for name, advantages in expected.items():
        assert found[name] == pytest.approx(advantages, abs=1e-5)


@examples(100)
@given(both=losses())
def test_lost_trajectories_are_in_no_mean_or_share(both: tuple[list[Trajectory], list[Trajectory]]) -> None:
    found, expected = (
        {
            name: value
            for name, value in rollout_metrics(each, success_threshold=0.5, weight_version=3).items()
            if not name.startswith(COUNTED)
        }
        for each in both
    )
    assert found == pytest.approx(expected)


def test_a_bug_counts_as_not_correct_and_an_outage_counts_as_nothing() -> None:
    sampled = sample_trajectories(tiny_policy(), num_groups=1, n=3)
    right, wrong, lost = (
        structs.replace(t, reward=reward) for t, reward in zip(sampled, (1.0, 0.0, 0.0), strict=True)
    )
    for kind in FailureKind:
        evaluation = summarise([right, wrong, failed(lost, kind)], success_threshold=1.0)
        is_counted = kind is FailureKind.CODE
        assert evaluation.scores.num_samples == (3 if is_counted else 2)
        assert evaluation.scores.pass_at_k[1].value == pytest.approx(1 / 3 if is_counted else 1 / 2)
        assert evaluation.scores.pass_at_k[2].value == pytest.approx(2 / 3 if is_counted else 1)
        assert evaluation.scores.mean_reward is not None
        assert evaluation.scores.mean_reward.value == 0.5
        assert evaluation.failures == {kind: 1}


# -- forks -------------------------------------------------------------------------------------------------------------

WEIGHT, KL = 0.25, 1 / 16
"""Weight of the rewards of turns, and penalty of each trained token; exact in float32."""


@dataclass(frozen=True)
class Path:
    """Turns of a trajectory, or those of a continuation after the fork."""

    reward: float | None
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Forked:
    main: Path
    continuations: tuple[tuple[int, Path], ...] = ()
    """First turn of its own and path of each continuation."""

    def whole(self, turn: int, path: Path) -> Path:
        return Path(path.reward, self.main.turns[:turn] + path.turns)


rewards = st.sampled_from([0.0, 0.5, 1.0, -2.0, 0.125])
turn = st.tuples(st.integers(1, 3), st.none() | rewards).map(lambda values: Turn(*values))
paths = st.builds(Path, st.none() | rewards, st.lists(turn, max_size=3).map(tuple))
mains = st.builds(Path, st.none() | rewards, st.lists(turn, min_size=1, max_size=4).map(tuple))


@st.composite
def forked_rollouts(draw: st.DrawFn) -> Forked:
    """Draw a rollout. One that was not scored is not forked."""
    main = draw(mains)
    if len(main.turns) < 2 or main.reward is None:
        return Forked(main)
    forks = st.tuples(st.integers(1, len(main.turns) - 1), paths)
    return Forked(main, tuple(draw(st.lists(forks, max_size=5))))


forked_groups = st.lists(st.lists(forked_rollouts(), min_size=1, max_size=4), min_size=1, max_size=3)


def total(path: Path) -> float | None:
    if path.reward is None:
        return None
    return path.reward + sum(WEIGHT * (turn.reward or 0.0) - KL * turn.num_tokens for turn in path.turns)


def reference(groups: Sequence[Sequence[Forked]], *, train: bool) -> dict[tuple[int, int, int], list[float]]:
    """Return the advantage of each turn by group, rollout and branch."""
    found: dict[tuple[int, int, int], list[float]] = {}
    for g, group in enumerate(groups):
        for r, rollout in enumerate(group):
            own = total(rollout.main)
            if own is None:
                continue
            others = [total(other.main) for n, other in enumerate(group) if n != r]
            scored = [each for each in others if each is not None]
            values: dict[int, float] = {0: float(np.mean(scored))} if scored else {}
            of_turn: dict[int, list[float]] = {}
            for turn, path in rollout.continuations:
                reward = total(rollout.whole(turn, path))
                if reward is not None:
                    of_turn.setdefault(turn, []).append(reward)
            values |= {turn: float(np.mean(each)) for turn, each in of_turn.items()}
            values[len(rollout.main.turns)] = own
            found[g, r, 0] = []
            for turn in range(len(rollout.main.turns)):
                before = max((state for state in values if state <= turn), default=None)
                after = min(state for state in values if state > turn)
                found[g, r, 0].append(0.0 if before is None else values[after] - values[before])
            for b, (turn, path) in enumerate(rollout.continuations, 1):
                reward = total(rollout.whole(turn, path))
                if reward is not None:
                    rivals = [*of_turn[turn], own]
                    rivals.remove(reward)
                    advantage = reward - float(np.mean(rivals)) if train else 0.0
                    found[g, r, b] = [0.0] * turn + [advantage] * len(path.turns)
    return found


def forked_trajectories(groups: Sequence[Sequence[Forked]]) -> list[Trajectory]:
    mains: list[Trajectory] = []
    branches: list[Trajectory] = []
    for g, group in enumerate(groups):
        for r, rollout in enumerate(group):
            number, main = 0 if rollout.continuations else None, rollout.main
            first = output_of(main.turns, group=g)
            mains.append(Trajectory(first, {}, g, r, main.reward, {}, number))
            for b, (turn, path) in enumerate(rollout.continuations, 1):
                turns = rollout.whole(turn, path).turns
                output = output_of(turns, group=g, shares=(first, turn), **{FORKED_TURN: turn})
                branches.append(Trajectory(output, {}, g, r, path.reward, {}, b))
    return [*mains, *branches]


def estimated(
    groups: Sequence[Sequence[Forked]], *, train: bool = True
) -> tuple[list[Trajectory], RolloutBatch, BatchAdvantages]:
    settings = {"adv_estimator": "fork", "turn_reward_weight": WEIGHT, "kl_reward_coef": 1.0}
    config = AlgorithmConfig.model_validate({**settings, "fork": {"train": train}})
    trajectories = forked_trajectories(groups)
    batch = assemble(trajectories, pad_token_id=PAD)
    kl_BR = KL * batch["response_mask"]
    found = estimate_batch(batch, estimators=load_estimators(config), response_length=99, kl_BR=kl_BR)
    return trajectories, batch, found


@pytest.mark.parametrize("train", [True, False])
@examples(150)
@given(groups=forked_groups)
def test_a_stretch_gets_the_next_value_minus_the_last_one(train: bool, groups: list[list[Forked]]) -> None:
    expected = reference(groups, train=train)
    trajectories, batch, found = estimated(groups, train=train)
    for row, trajectory in enumerate(trajectories):
        values = expected.get((trajectory.group, trajectory.rollout, trajectory.branch or 0))
        group = [total(rollout.main) for rollout in groups[trajectory.group]]
        is_compared = not trajectory.branch and len({each for each in group if each is not None}) > 1
        has_credit = values is not None and any(abs(each) > 1e-9 for each in _trained(values, trajectory))
        assert bool(found.has_signal_B[row]) == (values is not None and (is_compared or has_credit))
        turn, place = -1, 0
        for segment in trajectory.output.response_segments:
            turn += segment.origin is Origin.MODEL
            for _ in range(len(segment)):
                if (
                    values is not None
                    and segment.origin is Origin.MODEL
                    and batch["response_mask"][row, place]
                ):
                    advantage = float(found.advantages_BR[row, place])
                    assert advantage == pytest.approx(values[turn], abs=1e-6), (trajectory, turn)
                place += 1


def _trained(values: Sequence[float], trajectory: Trajectory) -> Sequence[float]:
    return values[int(trajectory.output.extra_fields.get(FORKED_TURN, 0)) :]


def test_shared_tokens_are_trained_once_and_those_of_a_continuation_in_its_own_row() -> None:
    rollout = Forked(Path(1.0, (Turn(2), Turn(1))), ((1, Path(0.0, (Turn(3),))),))
    _, batch, found = estimated([[rollout, Forked(Path(0.0, (Turn(1),)))]])
    assert batch["response_mask"].tolist() == [
        [1, 1, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 1, 1],
    ]
    assert found.keep_B.all()

"""A rollout counts once in losses, mini-batches, metrics and the selection of groups, however many branches it has."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor

from agent_loop.config import ActorConfig, AggregationMode, AlgorithmConfig
from agent_loop.rollout.batch import assemble
from agent_loop.training.actor import Actor
from agent_loop.training.advantages.groups import has_signal, rollouts_of_rows
from agent_loop.training.losses.terms import Aggregation
from agent_loop.training.rollouts import with_variance
from agent_loop.training.step_metrics import rollout_metrics
from agent_loop.trajectory import Failure, Trajectory
from agent_loop.types import StopReason
from tests.harness import examples
from tests.training.fakes import PAD, tiny_policy
from tests.training.samples import Branch, Rollout, samples_of

MODES: list[AggregationMode] = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def scores(*rollouts: Sequence[float | None]) -> list[Trajectory]:
    """Return the branches of the rollouts of one group with these rewards."""
    group = [Rollout(tuple(map(Branch, rewards))) for rewards in rollouts]
    return [sample.trajectory for sample in samples_of([group])]


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


def test_metrics_count_a_rollout_once() -> None:
    trajectories = scores([1.0], [0.0, 0.0, 0.0], [None, 0.5])
    trajectories[-2] = structs.replace(
        trajectories[-2], output=trajectories[-2].output.failed(Failure(error="Boom", traceback=""))
    )

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
def test_a_group_is_kept_if_its_rollouts_have_different_rewards(
    rollouts: list[list[float | None]], is_kept: bool
) -> None:
    trajectories = scores(*rollouts)
    batch = assemble(trajectories, pad_token_id=PAD)
    signal_B = has_signal(batch["reward"], groups_B=batch["group"], rollouts_B=rollouts_of_rows(batch))

    kept = with_variance(trajectories, algorithm=AlgorithmConfig())

    assert kept == (trajectories if is_kept else [])
    assert signal_B.any() == is_kept

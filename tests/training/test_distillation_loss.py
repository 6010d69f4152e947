"""Divergences between policy and teacher, against numpy in float64 and against whole distributions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from agent_loop.config import DistillationConfig
from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.servers.scores import TokenScores
from agent_loop.training.distillation.scoring import Lesson, Lessons
from agent_loop.training.distillation.targets import Direction, TeacherTargets, divergence
from agent_loop.training.forward import response_logprobs
from agent_loop.training.micro_batches import micro_batches
from agent_loop.trajectory import Trajectory
from tests.training.fakes import PAD, VOCABULARY, sample_trajectories, tiny_policy

DIRECTIONS: tuple[Direction, ...] = ("forward_kl", "reverse_kl")
Array = NDArray[np.float64]
STEP = 1e-5


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def reference(policy_V: Array, teacher_V: Array, *, k: int, direction: Direction) -> float:
    """Return the divergence over the teacher's `k` likeliest tokens and the rest, from two distributions."""
    top = np.argsort(-teacher_V, kind="stable")[:k]
    p, q = ([*each[top], np.delete(each, top).sum()] for each in (teacher_V, policy_V))
    if direction == "reverse_kl":
        p, q = q, p
    return float(sum(x * (np.log(x) - np.log(y)) for x, y in zip(p, q, strict=True) if x > 0))


def losses(logits_V: Tensor, teacher_V: Array, *, k: int, direction: Direction) -> Tensor:
    top = np.argsort(-teacher_V, kind="stable")[:k]
    return divergence(
        logits_V.log_softmax(-1)[None, None, torch.from_numpy(top)],
        teacher_logprobs_BRK=torch.from_numpy(np.log(teacher_V[top]))[None, None],
        is_taught_BR=torch.tensor([[True]]),
        direction=direction,
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 8), spread=st.sampled_from([0.3, 1.0, 3.0]))
def test_the_divergence_and_its_gradient_are_those_of_numpy(
    direction: Direction, seed: int, k: int, spread: float
) -> None:
    random = np.random.default_rng(seed)
    logits = random.normal(size=8) * spread
    teacher_V = softmax(random.normal(size=8))
    logits_V = torch.tensor(logits, requires_grad=True)

    [[found]] = losses(logits_V, teacher_V, k=k, direction=direction)
    found.backward()

    assert float(found.detach()) == pytest.approx(
        reference(softmax(logits), teacher_V, k=k, direction=direction), abs=1e-6
    )
    slopes: list[float] = []
    for number in range(8):
        above, below = (
            reference(softmax(logits + sign * STEP * np.eye(8)[number]), teacher_V, k=k, direction=direction)
            for sign in (1, -1)
        )
        slopes.append((above - below) / (2 * STEP))
    assert logits_V.grad is not None
    np.testing.assert_allclose(logits_V.grad.numpy(), slopes, atol=1e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("value", [float("-inf"), float("nan"), 3.0])
def test_values_at_tokens_that_are_not_taught_change_nothing(direction: Direction, value: float) -> None:
    logprobs_BRK = torch.tensor([[[-1.0, -2.0], [value, value]]], requires_grad=True)
    teacher_BRK = torch.tensor([[[-0.5, -1.5], [value, value]]])

    found_BR = divergence(
        logprobs_BRK,
        teacher_logprobs_BRK=teacher_BRK,
        is_taught_BR=torch.tensor([[True, False]]),
        direction=direction,
    )
    found_BR.sum().backward()

    assert found_BR[0, 0] > 0
    assert found_BR[0, 1] == 0
    assert logprobs_BRK.grad is not None
    assert logprobs_BRK.grad[0, 1].tolist() == [0.0, 0.0]
    assert logprobs_BRK.grad[0, 0].isfinite().all()


def taught_batch(trajectories: list[Trajectory], *, k: int) -> tuple[RolloutBatch, list[Tensor]]:
    """Return a batch with the scores of a tiny teacher, and the teacher's log-probs of the whole vocabulary."""
    teacher: Any = tiny_policy(5)
    lessons: list[Lesson | None] = []
    whole: list[Tensor] = []
    for trajectory in trajectories:
        output = trajectory.output
        ids = torch.tensor([*output.prompt_ids, *output.response_ids])
        with torch.no_grad():
            logprobs_RV = teacher(ids[None]).logits[0, len(output.prompt_ids) - 1 : -1].log_softmax(-1)
        top = logprobs_RV.topk(k, dim=-1)
        sampled_R = logprobs_RV.gather(-1, torch.tensor(output.response_ids).long()[:, None])[:, 0]
        scores = TokenScores(sampled_R.numpy(), top.indices.int().numpy(), top.values.numpy())
        lessons.append(Lesson(0, scores))
        whole.append(logprobs_RV)
    batch = assemble(trajectories, pad_token_id=PAD)
    Lessons(lessons).add_columns(batch)
    return batch, whole


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_with_all_tokens_as_candidates_whole_distributions_are_compared(direction: Direction) -> None:
    model: Any = tiny_policy()
    trajectories = sample_trajectories(tiny_policy(), num_groups=2, n=3)
    batch, teacher_of_rows = taught_batch(trajectories, k=VOCABULARY)
    config = DistillationConfig.model_validate({"teachers": {"big": {}}, "objective": direction})
    targets = TeacherTargets.of(batch, config=config)
    assert targets is not None

    for part in micro_batches(
        batch, rows=torch.arange(len(batch)), max_tokens=40, device=torch.device("cpu")
    ):
        found = response_logprobs(model, part, temperature=1.0, candidate_ids_BRK=targets.candidate_ids(part))
        losses_BR = targets.losses(found, part)
        losses_BR.sum().backward()
        gradient = model.model.norm.weight.grad.clone()
        model.zero_grad()

        total = torch.tensor(0.0)
        for index, row in enumerate(part.rows_B.tolist()):
            output = trajectories[row].output
            ids = torch.tensor([*output.prompt_ids, *output.response_ids])
            policy_RV = model(ids[None]).logits[0, len(output.prompt_ids) - 1 : -1].log_softmax(-1)
            sides = (policy_RV, teacher_of_rows[row])
            log_q, log_p = sides if direction == "forward_kl" else sides[::-1]
            expected_R = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
            expected_R = expected_R * torch.tensor(output.response_mask)
            torch.testing.assert_close(losses_BR[index, : len(expected_R)], expected_R, atol=1e-5, rtol=0)
            total = total + expected_R.sum()
        total.backward()
        torch.testing.assert_close(gradient, model.model.norm.weight.grad, atol=1e-5, rtol=1e-4)
        model.zero_grad()


def test_the_advantage_of_a_token_is_the_difference_of_log_probs_and_zero_where_nothing_is_taught() -> None:
    trajectories = sample_trajectories(tiny_policy(), num_groups=1, n=2)
    batch, _ = taught_batch(trajectories, k=1)
    batch["distillation.teacher"][1] = -1
    config = DistillationConfig.model_validate({"teachers": {"big": {}}, "objective": "reward"})
    targets = TeacherTargets.of(batch, config=config)
    assert targets is not None

    found_BR = targets.advantages(batch["rollout_log_probs"])

    mask_BR = batch["response_mask"] * torch.tensor([[1], [0]])
    expected_BR = (batch["distillation.log_probs"] - batch["rollout_log_probs"]) * mask_BR
    torch.testing.assert_close(found_BR, expected_BR)
    assert found_BR[0].count_nonzero() == mask_BR[0].sum()

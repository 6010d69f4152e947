"""Losses equal token-by-token references."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from agent_loop.config import AggregationMode, KLEstimator
from agent_loop.training.losses.logprobs import TokenLogProbs, entropy, token_logprobs
from agent_loop.training.losses.terms import (
    MAX_LOG_RATIO,
    Aggregation,
    kl_penalty,
    masked_difference,
    value_loss,
)

LOW, HIGH = 0.2, 0.28
MODES: list[AggregationMode] = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
WIDTH = 9


def aggregation(mask_BT: Tensor, mode: AggregationMode) -> Aggregation:
    rows = torch.arange(len(mask_BT))
    return Aggregation.of_rows(mask_BT, rows=rows, rollouts_B=rows, mode=mode)


def ragged(seed: int, rows: int = 5, width: int = WIDTH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, width + 1, (rows, 1), generator=generator)
    mask_BT = (torch.arange(width) < lengths) & (torch.rand(rows, width, generator=generator) < 0.7)
    mask_BT[0, 0] = True
    return {
        "logprobs_BT": -3 * torch.rand(rows, width, generator=generator, dtype=torch.float64),
        "old_logprobs_BT": -3 * torch.rand(rows, width, generator=generator, dtype=torch.float64),
        "advantages_BT": torch.randn(rows, 1, generator=generator, dtype=torch.float64).expand(rows, width),
        "mask_BT": mask_BT.long(),
    }


def naive_mean(values: list[list[float]], mode: AggregationMode) -> float:
    rows = [row for row in values if row]
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if mode == "seq-mean-token-sum-norm":
        return sum(map(sum, rows)) / (len(rows) * WIDTH)
    return sum(sum(row) / len(row) for row in rows) / len(rows)


def test_token_logprobs_and_entropy_are_those_of_the_tempered_softmax() -> None:
    logits_NV = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    token_ids_M, place_M = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 1, 2])

    candidate_ids_MK = torch.tensor([[0, 4], [3, 3], [2, 1], [4, 0]])

    found = token_logprobs(
        logits_NV,
        token_ids_M=token_ids_M,
        place_M=place_M,
        temperature=0.7,
        candidate_ids_MK=candidate_ids_MK,
    )

    assert found.candidates_MK is not None

    for token, index in enumerate(place_M.tolist()):
        weights = [math.exp(x / 0.7) for x in logits_NV[index].tolist()]
        chances = [w / sum(weights) for w in weights]
        assert float(found.sampled_M[token]) == pytest.approx(math.log(chances[token_ids_M[token]]))
        assert found.candidates_MK[token].tolist() == pytest.approx(
            [math.log(chances[candidate]) for candidate in candidate_ids_MK[token].tolist()]
        )
        assert float(found.entropy_M[token]) == pytest.approx(-sum(p * math.log(p) for p in chances))


def test_an_entropy_for_metrics_only_has_no_gradient() -> None:
    logits_NV = torch.randn(2, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def of_tokens(*, entropy_has_gradient: bool) -> TokenLogProbs:
        return token_logprobs(
            logits_NV,
            token_ids_M=torch.tensor([1, 2]),
            place_M=torch.arange(2),
            temperature=1.0,
            entropy_has_gradient=entropy_has_gradient,
        )

    found = of_tokens(entropy_has_gradient=False)

    assert found.sampled_M.requires_grad
    assert not found.entropy_M.requires_grad
    torch.testing.assert_close(found.entropy_M, of_tokens(entropy_has_gradient=True).entropy_M)


def test_entropy_and_its_gradient_are_finite_where_a_token_is_impossible() -> None:
    logits_V = torch.tensor([0.0, 0.0, -1e4, -math.inf], requires_grad=True)

    value = entropy(logits_V.log_softmax(-1))
    value.backward()

    assert float(value.detach()) == pytest.approx(math.log(2))
    assert logits_V.grad is not None
    assert logits_V.grad.isfinite().all()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_estimators_of_the_kl_divergence_match_their_formulas(estimator: KLEstimator) -> None:
    data = ragged(0)

    kl_BT = kl_penalty(
        data["logprobs_BT"],
        reference_logprobs_BT=data["old_logprobs_BT"],
        mask_BT=data["mask_BT"],
        estimator=estimator,
    )

    for row, index in data["mask_BT"].nonzero().tolist():
        policy, reference = (
            float(data["logprobs_BT"][row, index]),
            float(data["old_logprobs_BT"][row, index]),
        )
        expected = {
            "k1": policy - reference,
            "k2": (policy - reference) ** 2 / 2,
            "k3": math.exp(reference - policy) - 1 - (reference - policy),
        }[estimator]
        assert float(kl_BT[row, index]) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert not kl_BT[data["mask_BT"] == 0].any()


@pytest.mark.parametrize("clip_range", [None, 0.3])
@pytest.mark.parametrize("mode", MODES)
def test_the_value_loss_is_the_larger_of_unclipped_and_clipped(
    mode: AggregationMode, clip_range: float | None
) -> None:
    data = ragged(4)
    values_BT, old_BT, returns_BT = (
        data["logprobs_BT"],
        data["old_logprobs_BT"],
        -data["logprobs_BT"].flip(0),
    )
    losses: list[list[float]] = []
    for row in range(5):
        losses.append([])
        for index in data["mask_BT"][row].nonzero().flatten().tolist():
            value, old, target = (float(x[row, index]) for x in (values_BT, old_BT, returns_BT))
            near = value if clip_range is None else min(max(value, old - clip_range), old + clip_range)
            losses[-1].append(max((value - target) ** 2, (near - target) ** 2) / 2)
    is_masked_BT = data["mask_BT"] == 0
    with_garbage_BT = torch.where(is_masked_BT, math.nan, values_BT).requires_grad_()

    loss, clip_fraction = value_loss(
        with_garbage_BT,
        old_values_BT=old_BT,
        returns_BT=torch.where(is_masked_BT, math.inf, returns_BT),
        mask_BT=data["mask_BT"],
        clip_range=clip_range,
        reduce=aggregation(data["mask_BT"], mode),
    )
    loss.backward()

    assert float(loss.detach()) == pytest.approx(naive_mean(losses, mode), rel=1e-12)
    assert (float(clip_fraction) > 0) == (clip_range is not None)
    assert with_garbage_BT.grad is not None
    assert (with_garbage_BT.grad[is_masked_BT] == 0).all()


IMPOSSIBLE = {"both": (-math.inf, -math.inf), "new": (-math.inf, -1.0), "old": (-1.0, -math.inf)}
"""New and old log-prob of a token that one or both of the policies cannot sample."""
LOG_RATIOS = {"both": 0.0, "new": -20.0, "old": 20.0}


def impossible_token(where: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return new log-probs with a gradient, old log-probs, and a mask.

    The impossible token is the second token of the first row.
    """
    new, other = IMPOSSIBLE[where]
    new_BT = torch.tensor([[-1.0, new, -2.0], [-1.0, -1.0, -1.0]], dtype=torch.float64).requires_grad_()
    other_BT = torch.tensor([[-1.2, other, -2.0], [-1.0, -1.1, -1.0]], dtype=torch.float64)
    return new_BT, other_BT, torch.tensor([[1, 1, 1], [1, 1, 0]])


def assert_others_learn(logprobs_BT: Tensor) -> None:
    grad_BT = logprobs_BT.grad
    assert grad_BT is not None
    assert grad_BT.isfinite().all()
    assert grad_BT[0, 1] == 0
    assert grad_BT[1, 1] != 0


@pytest.mark.parametrize("where", IMPOSSIBLE)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_of_an_impossible_token_is_finite_and_has_no_gradient(
    where: str, estimator: KLEstimator
) -> None:
    new_BT, reference_BT, mask_BT = impossible_token(where)

    kl_BT = kl_penalty(new_BT, reference_logprobs_BT=reference_BT, mask_BT=mask_BT, estimator=estimator)
    kl_BT.sum().backward()

    x = -LOG_RATIOS[where]  # log(reference / policy)
    expected = {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[estimator]
    assert float(kl_BT[0, 1].detach()) == pytest.approx(expected)
    assert kl_BT.isfinite().all()
    assert_others_learn(new_BT)


def test_log_ratios_beyond_the_bound_are_clamped_and_have_no_gradient() -> None:
    left_BT = torch.tensor([[-1.0, -1.0, -60.0]]).requires_grad_()

    got_BT = masked_difference(left_BT, torch.tensor([[-2.0, -60.0, -1.0]]), mask_BT=torch.ones(1, 3))
    got_BT.sum().backward()

    assert got_BT.tolist() == [[1.0, MAX_LOG_RATIO, -MAX_LOG_RATIO]]
    assert left_BT.grad is not None
    assert left_BT.grad.tolist() == [[1.0, 0.0, 0.0]]

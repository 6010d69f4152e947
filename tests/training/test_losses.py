"""Losses against token-by-token references."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from agent_loop.training.losses import (
    AggregationMode,
    aggregate,
    entropy,
    kl_penalty,
    loss_denominator,
    masked_mean,
    policy_loss,
    token_log_probs,
)

LOW, HIGH = 0.2, 0.28
MODES: list[AggregationMode] = ["token-mean", "seq-mean-token-mean"]


def ragged(seed: int, rows: int = 5, width: int = 9) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, width + 1, (rows, 1), generator=generator)
    mask_BT = (torch.arange(width) < lengths) & (torch.rand(rows, width, generator=generator) < 0.7)
    mask_BT[0, 0] = True
    return {
        "log_probs_BT": -3 * torch.rand(rows, width, generator=generator, dtype=torch.float64),
        "old_log_probs_BT": -3 * torch.rand(rows, width, generator=generator, dtype=torch.float64),
        "advantages_BT": torch.randn(rows, 1, generator=generator, dtype=torch.float64).expand(rows, width),
        "mask_BT": mask_BT.long(),
    }


def naive_mean(values: list[list[float]], mode: AggregationMode) -> float:
    rows = [row for row in values if row]
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    return sum(sum(row) / len(row) for row in rows) / len(rows)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(5))
def test_the_policy_loss_is_the_clipped_surrogate(seed: int, mode: AggregationMode) -> None:
    data = ragged(seed)
    losses: list[list[float]] = []
    clipped: list[list[float]] = []
    kls: list[list[float]] = []
    for row in range(5):
        places = data["mask_BT"][row].nonzero().flatten().tolist()
        new, old = data["log_probs_BT"][row].tolist(), data["old_log_probs_BT"][row].tolist()
        advantage = float(data["advantages_BT"][row, 0])
        ratios = [math.exp(new[t] - old[t]) for t in places]
        bounded = [min(max(ratio, 1 - LOW), 1 + HIGH) for ratio in ratios]
        losses.append([-min(r * advantage, b * advantage) for r, b in zip(ratios, bounded, strict=True)])
        clipped.append([float(r * advantage > b * advantage) for r, b in zip(ratios, bounded, strict=True)])
        kls.append([old[t] - new[t] for t in places])

    got = policy_loss(**data, clip_ratio_low=LOW, clip_ratio_high=HIGH, agg_mode=mode)

    assert float(got.loss) == pytest.approx(naive_mean(losses, mode), rel=1e-12)
    assert float(got.clip_fraction) == pytest.approx(naive_mean(clipped, mode), rel=1e-12)
    assert float(got.ppo_kl) == pytest.approx(naive_mean(kls, mode), rel=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, -1e30])
def test_masked_tokens_get_a_gradient_of_exactly_zero_whatever_they_hold(
    mode: AggregationMode, garbage: float
) -> None:
    data = ragged(1)
    is_masked_BT = data["mask_BT"] == 0
    log_probs_BT = torch.where(is_masked_BT, garbage, data["log_probs_BT"]).requires_grad_()
    clean_BT = data["log_probs_BT"].clone().requires_grad_()

    def loss(log_probs_BT: Tensor) -> Tensor:
        policy = policy_loss(
            **{**data, "log_probs_BT": log_probs_BT}, clip_ratio_low=LOW, clip_ratio_high=HIGH, agg_mode=mode
        )
        kl_BT = kl_penalty(
            log_probs_BT, reference_log_probs_BT=data["old_log_probs_BT"], mask_BT=data["mask_BT"]
        )
        return policy.loss + aggregate(kl_BT, mask_BT=data["mask_BT"], mode=mode)

    dirty, clean = loss(log_probs_BT), loss(clean_BT)
    dirty.backward()
    clean.backward()

    assert float(dirty.detach()) == float(clean.detach())
    assert log_probs_BT.grad is not None
    assert clean_BT.grad is not None
    assert (log_probs_BT.grad[is_masked_BT] == 0).all()
    assert torch.equal(log_probs_BT.grad, clean_BT.grad)


@pytest.mark.parametrize("mode", MODES)
def test_the_parts_of_a_mini_batch_add_up_to_the_whole(mode: AggregationMode) -> None:
    data = ragged(3, rows=8)
    options = {"clip_ratio_low": LOW, "clip_ratio_high": HIGH, "agg_mode": mode}
    denominator = loss_denominator(data["mask_BT"], mode=mode)

    whole = policy_loss(**data, **options).loss
    parts = sum(
        policy_loss(
            **{name: values[rows] for name, values in data.items()}, **options, denominator=denominator
        ).loss
        for rows in ([0], [1, 2, 3], [4, 5], [6, 7])
    )

    assert float(parts) == pytest.approx(float(whole), rel=1e-12)


def test_a_rising_ratio_is_clipped_higher_than_a_falling_one() -> None:
    log_probs_BT = torch.tensor([[1.25, 1.3, 0.75, 0.85]]).log().requires_grad_()
    got = policy_loss(
        log_probs_BT,
        old_log_probs_BT=torch.zeros(1, 4),
        advantages_BT=torch.tensor([[1.0, 1.0, -1.0, -1.0]]),
        mask_BT=torch.ones(1, 4),
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
    )
    got.loss.backward()

    assert log_probs_BT.grad is not None
    assert (log_probs_BT.grad != 0).tolist() == [[True, False, False, True]]
    assert float(got.clip_fraction) == 0.5


def test_the_kl_penalty_is_zero_at_the_reference_and_positive_elsewhere() -> None:
    reference_BT, mask_BT = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[1, 1, 0]])

    same_BT = kl_penalty(reference_BT, reference_log_probs_BT=reference_BT, mask_BT=mask_BT)
    other_BT = kl_penalty(reference_BT + 0.5, reference_log_probs_BT=reference_BT, mask_BT=mask_BT)

    assert same_BT.tolist() == [[0, 0, 0]]
    assert other_BT[0].tolist() == pytest.approx([math.exp(-0.5) - 1 + 0.5] * 2 + [0])


def test_token_log_probs_and_entropy_are_those_of_the_tempered_softmax() -> None:
    logits_BTV = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    token_ids_BT = torch.tensor([[0, 1, 2], [3, 4, 0]])

    log_probs_BT, entropy_BT = token_log_probs(logits_BTV, token_ids_BT=token_ids_BT, temperature=0.7)

    for row in range(2):
        for place in range(3):
            weights = [math.exp(x / 0.7) for x in logits_BTV[row, place].tolist()]
            chances = [w / sum(weights) for w in weights]
            assert float(log_probs_BT[row, place]) == pytest.approx(
                math.log(chances[token_ids_BT[row, place]])
            )
            assert float(entropy_BT[row, place]) == pytest.approx(-sum(p * math.log(p) for p in chances))


def test_half_precision_logits_are_reduced_in_single_precision() -> None:
    logits_BTV = torch.randn(1, 2, 5, generator=torch.Generator().manual_seed(0)).bfloat16()

    log_probs_BT, _ = token_log_probs(logits_BTV, token_ids_BT=torch.tensor([[1, 2]]), temperature=1.0)

    assert log_probs_BT.dtype == torch.float32


def test_entropy_and_its_gradient_are_finite_where_a_token_is_impossible() -> None:
    logits_V = torch.tensor([0.0, 0.0, -1e4, -math.inf], requires_grad=True)

    value = entropy(logits_V.log_softmax(-1))
    value.backward()

    assert float(value.detach()) == pytest.approx(math.log(2))
    assert logits_V.grad is not None
    assert logits_V.grad.isfinite().all()


def test_a_mean_over_nothing_is_zero() -> None:
    assert float(masked_mean(torch.ones(2, 3), mask_BT=torch.zeros(2, 3))) == 0

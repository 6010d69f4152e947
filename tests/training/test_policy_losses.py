"""Each policy loss and its gradient equal a reference that is written token by token in NumPy, float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agent_loop.config import ActorConfig, AggregationMode
from agent_loop.training.losses.policy import TokenLoss, binary_divergence, load_policy_loss, token_loss
from agent_loop.training.losses.terms import Aggregation
from tests.training.loss_references import CASES, Array, Case, case, reference, token_weights

MODES: list[AggregationMode] = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LOSSES: dict[str, dict[str, Any]] = {
    "ppo": {"policy_loss": "ppo"},
    "ppo with a dual clip": {"policy_loss": "ppo", "clip_ratio_c": 1.5},
    "gspo": {"policy_loss": "gspo"},
    "cispo": {"policy_loss": "cispo"},
    "cispo with a wide bound": {"policy_loss": "cispo", "clip_ratio_high": 5.0},
    "dppo with total variation": {"policy_loss": "dppo"},
    "dppo with KL": {"policy_loss": "dppo", "dppo_divergence": "kl"},
    "dppo with a threshold": {"policy_loss": "dppo", "dppo_threshold": 0.02, "clip_ratio_c": 2.0},
    "sapo": {"policy_loss": "sapo"},
    "sapo with temperatures": {"policy_loss": "sapo", "tau_pos": 0.5, "tau_neg": 3.0},
}


def compute(data: Case, config: ActorConfig, *, garbage: float | None = None) -> tuple[TokenLoss, Tensor]:
    """Return the loss of each token, and the log-probs that it has a gradient by."""
    filled = {
        name: values if garbage is None else np.where(data.mask, values, garbage)
        for name, values in {"new": data.new, "old": data.old, "advantages": data.advantages}.items()
    }
    logprobs_BT = torch.tensor(filled["new"]).requires_grad_()
    result = token_loss(
        load_policy_loss(config.policy_loss),
        logprobs_BT,
        old_logprobs_BT=torch.tensor(filled["old"]),
        advantages_BT=torch.tensor(filled["advantages"]),
        mask_BT=torch.tensor(data.mask).long(),
        config=config,
    )
    return result, logprobs_BT


def aggregated(data: Case, result: TokenLoss, mode: AggregationMode) -> Tensor:
    mask_BT = torch.tensor(data.mask).long()
    reduce = Aggregation.of_rows(
        mask_BT, rows=torch.arange(len(mask_BT)), rollouts_B=torch.tensor(data.rollouts), mode=mode
    )
    return reduce(result.loss_BT, mask_BT=mask_BT)


def gradient_of(loss: Tensor, logprobs_BT: Tensor) -> Array:
    [gradient_BT] = torch.autograd.grad(loss, logprobs_BT)
    return gradient_BT.numpy()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("data", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("settings", LOSSES.values(), ids=LOSSES.keys())
def test_a_loss_and_its_gradient_equal_the_formula_of_the_paper(
    settings: dict[str, Any], data: Case, mode: AggregationMode
) -> None:
    config = ActorConfig(**settings)
    expected, expected_gradient = reference(data, config)
    weights = token_weights(data, mode)

    result, logprobs_BT = compute(data, config)
    loss = aggregated(data, result, mode)

    np.testing.assert_allclose(
        result.loss_BT.detach().numpy()[data.mask], expected[data.mask], rtol=1e-9, atol=1e-9
    )
    assert float(loss.detach()) == pytest.approx((weights * expected).sum(), rel=1e-9, abs=1e-9)
    np.testing.assert_allclose(
        gradient_of(loss, logprobs_BT), weights * expected_gradient, rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("settings", LOSSES.values(), ids=LOSSES.keys())
def test_masked_tokens_change_no_loss_and_get_a_gradient_of_exactly_zero(
    settings: dict[str, Any], garbage: float
) -> None:
    config, data = ActorConfig(**settings), case(1)

    (clean, clean_BT), (dirty, dirty_BT) = compute(data, config), compute(data, config, garbage=garbage)
    losses = [aggregated(data, result, "seq-mean-token-mean") for result in (clean, dirty)]
    gradients = [gradient_of(loss, leaf) for loss, leaf in zip(losses, (clean_BT, dirty_BT), strict=True)]

    assert float(losses[0].detach()) == float(losses[1].detach())
    assert np.array_equal(gradients[0], gradients[1])
    assert not gradients[1][~data.mask].any()
    assert gradients[1][data.mask].any()


def test_the_binary_kl_is_exact_near_a_probability_of_one() -> None:
    old, new = -1e-3, -1e-9
    expected = math.exp(old) * (old - new) + -math.expm1(old) * math.log(math.expm1(old) / math.expm1(new))

    found_BT = binary_divergence(
        torch.tensor([[new]]), old_logprobs_BT=torch.tensor([[old]]), mask_BT=torch.ones(1, 1), kind="kl"
    )

    assert float(found_BT) == pytest.approx(expected, rel=1e-4)

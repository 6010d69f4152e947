"""Each policy loss and its gradient equal a reference that is written token by token in NumPy, float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent_loop.config import ActorConfig, AggregationMode, Divergence
from agent_loop.training.losses.policy import TokenLoss, binary_divergence, load_policy_loss, token_loss
from agent_loop.training.losses.terms import Aggregation

Array: TypeAlias = NDArray[np.float64]

NEVER = -math.inf


@dataclass(frozen=True)
class Case:
    """Inputs of a loss; [B, T] float64."""

    new: Array
    old: Array
    advantages: Array
    mask: NDArray[np.bool_]
    rollouts: tuple[int, ...]
    """Number of the rollout of each row."""


def case(seed: int, **changes: Any) -> Case:
    """Return rows with holes, with one token, without a token, and two branches of one rollout."""
    random = np.random.default_rng(seed)
    mask = random.random((6, 7)) < 0.7
    mask[0], mask[1], mask[2, 3] = False, [False] * 3 + [True] + [False] * 3, True
    values: dict[str, Any] = {
        "new": -2.5 * random.random(mask.shape),
        "old": -2.5 * random.random(mask.shape),
        "advantages": random.normal(size=mask.shape),
        "mask": mask,
        "rollouts": (0, 1, 2, 2, 3, 4),
    }
    return Case(**values | changes)


def impossible_tokens() -> Case:
    """Return tokens that one or both of the policies cannot sample, with advantages of both signs."""
    new = np.array([[NEVER, NEVER, -1.0, -30.0, -0.5], [NEVER, NEVER, -1.0, -0.1, -40.0]])
    old = np.array([[NEVER, -1.0, NEVER, -0.5, -0.6], [NEVER, -1.0, NEVER, -35.0, -0.2]])
    advantages = np.array([[0.7] * 5, [-1.3] * 5])
    return Case(new, old, advantages, np.ones(new.shape, bool), (0, 1))


def certain_tokens() -> Case:
    """Return tokens whose probability is 1, or nearly 1, under one or both of the policies."""
    new = np.array([[0.0, 0.0, -1e-9, -0.1, 0.0], [0.0, -1e-7, -0.3, 0.0, 0.0]])
    old = np.array([[0.0, -0.1, -1e-7, 0.0, -1e-6], [0.0, 0.0, 0.0, -0.3, -1e-9]])
    advantages = np.array([[1.0, -1.0, 1.0, -1.0, 1.0], [-1.0, 1.0, -1.0, 1.0, -1.0]])
    return Case(new, old, advantages, np.ones(new.shape, bool), (0, 0))


EQUAL = case(5)
CASES = {
    **{f"ragged {seed}": case(seed) for seed in range(4)},
    "equal log-probs": case(5, old=EQUAL.new.copy()),
    "advantages of 0": case(6, advantages=np.zeros((6, 7))),
    "impossible tokens": impossible_tokens(),
    "certain tokens": certain_tokens(),
}


def log_ratio(new: float, old: float) -> tuple[float, float]:
    """Return the log-ratio within its bounds, and its derivative: 0 where it is cut."""
    if new == old == NEVER:
        return 0.0, 0.0
    difference = new - old
    return min(max(difference, -20.0), 20.0), float(abs(difference) <= 20)


Token: TypeAlias = tuple[float, float, float, float, float]
"""Log-ratio, its derivative, log-prob, old log-prob and advantage."""


def clipped(ratio: float, advantage: float, config: ActorConfig) -> tuple[float, float]:
    """Return PPO's loss, and its derivative by the logarithm of the ratio."""
    bounded = min(max(ratio, 1 - config.clip_ratio_low), 1 + config.clip_ratio_high)
    objective = min(ratio * advantage, bounded * advantage)
    is_clipped = bounded * advantage < ratio * advantage
    if config.clip_ratio_c and advantage < 0 and objective < config.clip_ratio_c * advantage:
        return -config.clip_ratio_c * advantage, 0.0
    return -objective, 0.0 if is_clipped else -ratio * advantage


def ppo_reference(tokens: list[Token], config: ActorConfig) -> list[tuple[float, float]]:
    return [
        (loss, slope * derivative)
        for x, slope, _, _, advantage in tokens
        for loss, derivative in [clipped(math.exp(x), advantage, config)]
    ]


def gspo_reference(tokens: list[Token], config: ActorConfig) -> list[tuple[float, float]]:
    ratio = math.exp(sum(x for x, *_ in tokens) / len(tokens))
    return [
        (loss, slope * derivative)
        for _, slope, _, _, advantage in tokens
        for loss, derivative in [clipped(ratio, advantage, config)]
    ]


def cispo_reference(tokens: list[Token], config: ActorConfig) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for x, slope, new, _, advantage in tokens:
        weight = min(math.exp(x), 1 + config.clip_ratio_high)
        value = 0.0 if new == NEVER else new
        found.append((-weight * advantage * value, -weight * advantage * slope))
    return found


def entropy_term(p: float, q: float) -> float:
    """Return `p log(p / q)`, with the log-ratio within its bounds."""
    return 0.0 if p == 0 else p * (20.0 if q == 0 else min(max(math.log(p) - math.log(q), -20.0), 20.0))


def divergence(new: float, old: float, kind: Divergence) -> float:
    p, q = math.exp(new), math.exp(old)
    if kind == "tv":
        return (abs(p - q) + abs((1 - p) - (1 - q))) / 2
    rest_p, rest_q = -math.expm1(new), -math.expm1(old)
    return entropy_term(q, p) + entropy_term(rest_q, rest_p)


def dppo_reference(tokens: list[Token], config: ActorConfig) -> list[tuple[float, float]]:
    threshold = config.dppo_threshold or (0.15 if config.dppo_divergence == "tv" else 0.05)
    found: list[tuple[float, float]] = []
    for x, slope, new, old, advantage in tokens:
        is_far = divergence(new, old, config.dppo_divergence) > threshold
        moves_away = (advantage > 0 and x > 0) or (advantage < 0 and x < 0)
        ratio = min(math.exp(x), config.clip_ratio_c or math.inf)
        keep = 0.0 if is_far and moves_away else 1.0
        found.append((-keep * ratio * advantage, -keep * ratio * advantage * slope))
    return found


def sapo_reference(tokens: list[Token], config: ActorConfig) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for x, slope, _, _, advantage in tokens:
        tau = config.tau_pos if advantage > 0 else config.tau_neg
        ratio = math.exp(x)
        share = 1 / (1 + math.exp(-min(tau * (ratio - 1), 700.0)))
        found.append((-4 / tau * share * advantage, -4 * share * (1 - share) * ratio * advantage * slope))
    return found


REFERENCES: Mapping[str, Callable[[list[Token], ActorConfig], list[tuple[float, float]]]] = {
    "ppo": ppo_reference,
    "gspo": gspo_reference,
    "cispo": cispo_reference,
    "dppo": dppo_reference,
    "sapo": sapo_reference,
}


def reference(data: Case, config: ActorConfig) -> tuple[Array, Array]:
    """Return the loss of each token and its derivative by the token's log-prob; 0 at masked tokens."""
    losses, gradients = np.zeros(data.mask.shape), np.zeros(data.mask.shape)
    for row in range(len(data.mask)):
        places = np.flatnonzero(data.mask[row])
        tokens = [
            (*log_ratio(new, old), new, old, advantage)
            for new, old, advantage in zip(
                data.new[row, places].tolist(),
                data.old[row, places].tolist(),
                data.advantages[row, places].tolist(),
                strict=True,
            )
        ]
        if tokens:
            found = REFERENCES[config.policy_loss](tokens, config)
            losses[row, places], gradients[row, places] = np.array(found).T
    return losses, gradients


def token_weights(data: Case, mode: AggregationMode) -> Array:
    """Return the weight of each token in the aggregated loss. A rollout counts once."""
    rollouts = np.array(data.rollouts)[:, None]
    lengths = {rollout: int(data.mask[rollouts[:, 0] == rollout].sum()) for rollout in set(data.rollouts)}
    num_rollouts = sum(length > 0 for length in lengths.values())
    own_length = np.vectorize(lengths.get)(rollouts).astype(float)
    if mode == "token-mean":
        return data.mask / data.mask.sum()
    divisor = data.mask.shape[1] if mode == "seq-mean-token-sum-norm" else np.maximum(own_length, 1)
    return data.mask / divisor / num_rollouts


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
def test_masked_tokens_change_no_loss_and_get_no_gradient(settings: dict[str, Any], garbage: float) -> None:
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

"""Log-probs, entropy, KL, importance weights, and the loss of the critic equal references token by token."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from agent_loop.config import AggregationMode, CorrectionConfig, KLEstimator
from agent_loop.training.losses.logprobs import TokenLogProbs, entropy, token_logprobs
from agent_loop.training.losses.terms import Aggregation, correct, kl_penalty, value_loss
from tests.harness import examples

NEVER = -math.inf


def test_token_logprobs_and_entropy_are_those_of_the_tempered_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    ids, places = [0, 1, 2, 3], [0, 1, 1, 2]
    candidates = [[0, 4], [3, 3], [2, 1], [4, 0]]

    def of_tokens(*, entropy_has_gradient: bool) -> TokenLogProbs:
        return token_logprobs(
            logits_NV,
            token_ids_M=torch.tensor(ids),
            place_M=torch.tensor(places),
            temperature=0.7,
            candidate_ids_MK=torch.tensor(candidates),
            entropy_has_gradient=entropy_has_gradient,
        )

    for entropy_has_gradient in (True, False):
        found = of_tokens(entropy_has_gradient=entropy_has_gradient)
        assert found.candidates_MK is not None
        assert found.sampled_M.requires_grad
        assert found.entropy_M.requires_grad == entropy_has_gradient
        for token, place in enumerate(places):
            weights = [math.exp(x / 0.7) for x in logits_NV[place].tolist()]
            chances = [w / sum(weights) for w in weights]
            assert found.sampled_M[token].item() == pytest.approx(math.log(chances[ids[token]]))
            expected = [math.log(chances[candidate]) for candidate in candidates[token]]
            assert found.candidates_MK[token].tolist() == pytest.approx(expected)
            assert found.entropy_M[token].item() == pytest.approx(-sum(p * math.log(p) for p in chances))


def test_entropy_and_its_gradient_are_finite_where_a_token_is_impossible() -> None:
    logits_V = torch.tensor([0.0, 0.0, -1e4, NEVER], requires_grad=True)
    value = entropy(logits_V.log_softmax(-1))
    value.backward()
    assert float(value.detach()) == pytest.approx(math.log(2))
    assert logits_V.grad is not None
    assert logits_V.grad.isfinite().all()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_divergence_matches_its_formula_and_bounds_impossible_tokens(estimator: KLEstimator) -> None:
    policy = [-1.0, -2.0, NEVER, NEVER, -1.0, math.nan]
    reference = [-1.2, -0.5, NEVER, -1.0, NEVER, math.nan]
    log_ratios = [-0.2, 1.5, 0.0, 20.0, -20.0]
    """Logarithm of reference / policy; the last token is masked."""
    policy_BT = torch.tensor([policy], dtype=torch.float64, requires_grad=True)
    kl_BT = kl_penalty(
        policy_BT,
        reference_logprobs_BT=torch.tensor([reference], dtype=torch.float64),
        mask_BT=torch.tensor([[1, 1, 1, 1, 1, 0]]),
        estimator=estimator,
    )
    kl_BT.sum().backward()
    expected = {
        "k1": [-x for x in log_ratios],
        "k2": [x * x / 2 for x in log_ratios],
        "k3": [math.exp(x) - 1 - x for x in log_ratios],
    }[estimator]
    assert kl_BT[0].tolist() == pytest.approx([*expected, 0.0], rel=1e-9)
    assert policy_BT.grad is not None
    assert policy_BT.grad[0, :2].all()
    assert policy_BT.grad[0, 2:].tolist() == [0.0] * 4


@pytest.mark.parametrize("clip_range", [None, 0.3])
def test_the_value_loss_is_the_larger_of_unclipped_and_clipped(clip_range: float | None) -> None:
    random = np.random.default_rng(4)
    values, olds, returns = 3 * random.random((3, 5, 9))
    mask = random.random((5, 9)) < 0.6
    near = values if clip_range is None else np.clip(values, olds - clip_range, olds + clip_range)
    expected = np.maximum((values - returns) ** 2, (near - returns) ** 2)[mask].mean() / 2
    mask_BT, rows = torch.tensor(mask).long(), torch.arange(5)
    with_garbage_BT = torch.tensor(np.where(mask, values, math.nan)).requires_grad_()
    loss, clip_fraction = value_loss(
        with_garbage_BT,
        old_values_BT=torch.tensor(olds),
        returns_BT=torch.tensor(np.where(mask, returns, math.inf)),
        mask_BT=mask_BT,
        clip_range=clip_range,
        reduce=Aggregation.of_rows(mask_BT, rows=rows, rollouts_B=rows, mode="token-mean"),
    )
    loss.backward()
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-12)
    is_clipped = (near - returns) ** 2 > (values - returns) ** 2
    assert float(clip_fraction) == pytest.approx(is_clipped[mask].mean())
    assert with_garbage_BT.grad is not None
    assert (with_garbage_BT.grad[~torch.tensor(mask)] == 0).all()


def split_into_rows(
    values: Sequence[Sequence[float]], rollouts: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    width = max(map(len, values))
    rows = [[*row, *[math.nan] * (width - len(row))] for row in values]
    values_BT = torch.tensor(rows, dtype=torch.float64)
    return values_BT, (~values_BT.isnan()).long(), torch.tensor(rollouts)


def reference_loss(rollouts: Sequence[Sequence[float]], mode: AggregationMode, *, length: int) -> float:
    """Return the loss over all tokens of each rollout."""
    if mode == "token-mean":
        return sum(map(sum, rollouts)) / sum(map(len, rollouts))
    if mode == "seq-mean-token-mean":
        return statistics.mean(map(statistics.mean, rollouts))
    return statistics.mean(sum(rollout) / length for rollout in rollouts)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@examples(40)
@given(data=st.data())
def test_a_rollouts_loss_does_not_depend_on_its_rows(mode: AggregationMode, data: st.DataObject) -> None:
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


ROLLOUTS = (0, 1, 1, 2, 3, 1)
"""Number of the rollout of each row: the second one has three branches, one of them without a token."""


def inputs() -> dict[str, Any]:
    """Return rows with holes, with one token, without a token, and with tokens that one side cannot sample."""
    random = np.random.default_rng(0)
    trainer, rollout = -2 * random.random((2, 6, 8))
    mask = random.random((6, 8)) < 0.7
    mask[2], mask[3], mask[4, :2], mask[0, :3] = False, [True] + [False] * 7, True, True
    trainer[4, 0] = rollout[4, 1] = trainer[0, 0] = rollout[0, 0] = NEVER
    rollout[3] = trainer[3]
    return {"trainer": trainer, "rollout": rollout, "mask": mask}


def expected_weights(
    data: dict[str, Any], config: CorrectionConfig, rollouts: Sequence[int]
) -> NDArray[np.float64]:
    """Return the weight of each token, 0 at masked tokens."""
    of_rollouts: dict[int, list[float]] = {rollout: [] for rollout in rollouts}
    differences: dict[tuple[int, int], float] = {}
    for row, column in np.argwhere(data["mask"]).tolist():
        new, old = data["trainer"][row, column], data["rollout"][row, column]
        difference = 0.0 if new == old else min(max(new - old, -20.0), 20.0)
        differences[row, column] = difference
        of_rollouts[rollouts[row]].append(difference)
    found = np.zeros(data["mask"].shape)
    for (row, column), difference in differences.items():
        own = of_rollouts[rollouts[row]]
        log_ratios = {"token": difference, "sequence": sum(own), "geometric": sum(own) / len(own)}
        ratio = math.exp(min(max(log_ratios[config.level], -20.0), 20.0))
        is_inside = config.min_ratio <= ratio <= config.max_ratio
        found[row, column] = min(ratio, config.max_ratio) if config.kind == "truncate" or is_inside else 0.0
    return found


@pytest.mark.parametrize("rollouts", [ROLLOUTS, None], ids=["branches", "rows"])
@pytest.mark.parametrize("bounds", [(0.5, 2.0), (0.98, 1.02), (0.0, 1e6)])
@pytest.mark.parametrize("kind", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_importance_weights_equal_those_of_whole_rollouts(
    level: Any, kind: Any, bounds: tuple[float, float], rollouts: tuple[int, ...] | None
) -> None:
    config = CorrectionConfig(kind=kind, level=level, min_ratio=bounds[0], max_ratio=bounds[1])
    data = inputs()
    found = correct(
        torch.tensor(data["trainer"]),
        rollout_logprobs_BT=torch.tensor(data["rollout"]),
        mask_BT=torch.tensor(data["mask"]).long(),
        config=config,
        rollouts_B=None if rollouts is None else torch.tensor(rollouts),
    )
    expected = expected_weights(data, config, rollouts or range(6))
    np.testing.assert_allclose(found.weights_BT.numpy(), expected, rtol=1e-9, atol=0)
    dropped = (expected[data["mask"]] == 0).mean()
    cut = (expected[data["mask"]] == bounds[1]).mean()
    assert (found.masked_share, found.truncated_share) == pytest.approx(
        (dropped, 0) if kind == "mask" else (0, cut)
    )

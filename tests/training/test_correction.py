"""Importance weights between rollout and trainer equal a reference that works on rollouts, not on rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from numpy.typing import NDArray

from agent_loop.config import CorrectionConfig
from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.training import metrics as names
from agent_loop.training.actor_loss import PastLogProbs, importance
from agent_loop.training.losses.terms import Correction, correct
from tests.training.fakes import PAD, sample_trajectories, tiny_policy

LEVELS = ["token", "sequence", "geometric"]
ROLLOUTS = (0, 1, 1, 2, 3, 1)
"""Number of the rollout of each row: the second one has three branches, one of them without a token."""


def inputs() -> dict[str, Any]:
    """Return rows with holes, with one token, without a token, and with tokens that one side cannot sample."""
    random = np.random.default_rng(0)
    trainer, rollout = -2 * random.random((2, 6, 8))
    mask = random.random((6, 8)) < 0.7
    mask[2], mask[3], mask[4, :2], mask[0, :3] = False, [True] + [False] * 7, True, True
    trainer[4, 0] = -math.inf
    rollout[4, 1] = -math.inf
    trainer[0, 0] = rollout[0, 0] = -math.inf
    rollout[3] = trainer[3]
    return {"trainer": trainer, "rollout": rollout, "mask": mask}


def expected_weights(data: dict[str, Any], config: CorrectionConfig) -> NDArray[np.float64]:
    """Return the weight of each token, 0 at masked tokens."""
    ratios: dict[int, list[float]] = {rollout: [] for rollout in ROLLOUTS}
    differences: dict[tuple[int, int], float] = {}
    for row, column in np.argwhere(data["mask"]).tolist():
        new, old = data["trainer"][row, column], data["rollout"][row, column]
        difference = 0.0 if new == old else min(max(new - old, -20.0), 20.0)
        differences[row, column] = difference
        ratios[ROLLOUTS[row]].append(difference)
    found = np.zeros(data["mask"].shape)
    for (row, column), difference in differences.items():
        own = ratios[ROLLOUTS[row]]
        log_ratio = {"token": difference, "sequence": sum(own), "geometric": sum(own) / len(own)}[
            config.level
        ]
        ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
        is_inside = config.min_ratio <= ratio <= config.max_ratio
        weight = min(ratio, config.max_ratio)
        found[row, column] = weight if config.kind == "truncate" or is_inside else 0.0
    return found


def corrected(
    data: dict[str, Any], config: CorrectionConfig, *, rollouts: tuple[int, ...] | None = ROLLOUTS
) -> Correction:
    return correct(
        torch.tensor(data["trainer"]),
        rollout_logprobs_BT=torch.tensor(data["rollout"]),
        mask_BT=torch.tensor(data["mask"]).long(),
        config=config,
        rollouts_B=None if rollouts is None else torch.tensor(rollouts),
    )


@pytest.mark.parametrize("bounds", [(0.5, 2.0), (0.98, 1.02), (0.0, 1e6)])
@pytest.mark.parametrize("kind", ["truncate", "mask"])
@pytest.mark.parametrize("level", LEVELS)
def test_the_weights_equal_those_of_whole_rollouts(
    level: Any, kind: Any, bounds: tuple[float, float]
) -> None:
    config = CorrectionConfig(kind=kind, level=level, min_ratio=bounds[0], max_ratio=bounds[1])
    data = inputs()

    weights = corrected(data, config).weights_BT.numpy()

    np.testing.assert_allclose(weights, expected_weights(data, config), rtol=1e-9, atol=0)


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_all_tokens_of_all_branches_of_a_rollout_have_one_weight(level: Any) -> None:
    data = inputs()
    config = CorrectionConfig(kind="truncate", level=level, max_ratio=1e6)

    weights = corrected(data, config).weights_BT.numpy()

    of_branches = np.array(ROLLOUTS)[:, None] == 1
    assert len(set(weights[of_branches & data["mask"]].tolist())) == 1
    of_single_rows = corrected(data, config, rollouts=None).weights_BT.numpy()
    assert weights[1].max() != pytest.approx(of_single_rows[1].max())


def test_the_geometric_mean_does_not_depend_on_the_length() -> None:
    difference = 0.01

    def weight(level: Any, length: int) -> float:
        result = correct(
            torch.full((1, length), -1.0),
            rollout_logprobs_BT=torch.full((1, length), -1.0 - difference),
            mask_BT=torch.ones(1, length, dtype=torch.int64),
            config=CorrectionConfig(kind="mask", level=level, min_ratio=0.9, max_ratio=1.1),
        )
        return float(result.weights_BT[0, -1])

    assert weight("geometric", 5) == pytest.approx(math.exp(difference))
    assert weight("geometric", 5_000) == pytest.approx(math.exp(difference))
    assert weight("sequence", 5) == pytest.approx(math.exp(5 * difference))
    assert weight("sequence", 5_000) == 0


def branched_batch() -> RolloutBatch:
    """Return two rollouts of one group; the rows 1 and 2 are branches of the second one."""
    first, second, third = sample_trajectories(tiny_policy(), num_groups=1, n=3)
    branches = [
        structs.replace(each, rollout=1, branch=branch) for branch, each in enumerate((second, third))
    ]
    return assemble([first, *branches], pad_token_id=PAD)


@pytest.mark.parametrize("trained", [[0, 1, 2], [0, 1]])
def test_the_actor_weighs_the_trained_branches_of_a_rollout_together(trained: list[int]) -> None:
    batch = branched_batch()
    mask_BR = batch["response_mask"].bool()
    shift_B1 = torch.tensor([[0.0], [0.1], [-0.3]])
    past = PastLogProbs(
        old_BR=batch["rollout_log_probs"] + shift_B1,
        rollout_BR=batch["rollout_log_probs"],
        reference_BR=None,
    )
    config = CorrectionConfig(kind="truncate", level="geometric", max_ratio=1e6)

    weights_BR, metrics = importance(batch, rows=torch.tensor(trained), past=past, config=config)

    assert weights_BR is not None
    own = [row for row in trained if row > 0]
    lengths = mask_BR.sum(dim=-1)
    mean = sum(float(shift_B1[row]) * int(lengths[row]) for row in own) / sum(
        int(lengths[row]) for row in own
    )
    assert weights_BR[0][mask_BR[0]].tolist() == pytest.approx([1.0] * int(lengths[0]))
    for row in own:
        assert weights_BR[row][mask_BR[row]].tolist() == pytest.approx([math.exp(mean)] * int(lengths[row]))
    assert not weights_BR[[row for row in range(3) if row not in trained]].any()
    assert metrics[names.MASKED_SHARE] == metrics[names.TRUNCATED_SHARE] == 0

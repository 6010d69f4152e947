"""Updates of the weights from a batch, by every estimator."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

from agent_loop.config import Config
from agent_loop.errors import DataError
from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.training import metrics as names
from agent_loop.training.actor import Actor
from agent_loop.training.checkpoint import Checkpoint
from agent_loop.training.learner import Learner, load_learner
from agent_loop.types import StopReason
from tests.training.fakes import PAD, REWARDED, sample_trajectories, tiny_policy

ESTIMATORS = [
    "grpo",
    "rloo",
    "remax",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gdpo",
    "turn_grpo",
    "gigpo",
    "gae",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    tiny_policy().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def batch() -> RolloutBatch:
    return assemble(sample_trajectories(tiny_policy(), num_groups=4, n=8), pad_token_id=PAD)


def settings(folder: Path, *, lr: float = 1e-3, **sections: dict[str, Any]) -> Config:
    return Config.model_validate(
        {
            **sections,
            "model": {"path": str(folder), "device": "cpu", **sections.get("model", {})},
            "actor": {"lr": lr, **sections.get("actor", {})},
            "critic": {"lr": 1e-2, **sections.get("critic", {})},
        }
    )


def weights(learner: Learner) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in learner.weights()}


def are_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, right[name]) for name, value in left.items())


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_raises_the_probability_of_rewarded_tokens(
    folder: Path, batch: RolloutBatch, estimator: str
) -> None:
    config = settings(
        folder,
        algorithm={
            "adv_estimator": estimator,
            "kl_reward_coef": 1e-3,
            "turn_reward_weight": 0.5,
            "reward_parts": {"reward": 1},
        },
    )
    learner = load_learner(config)
    baselines = dict.fromkeys(range(4), 0.1) if estimator == "remax" else None

    metrics = [learner.learn(batch, baseline_rewards=baselines) for _ in range(4)]

    with_tokens = Actor(learner.model, config=config.actor).logprobs(batch)
    is_rewarded_BR = (batch["responses"] == REWARDED) & batch["response_mask"].bool()
    gain_BR = with_tokens - batch["rollout_log_probs"]
    assert float(gain_BR[is_rewarded_BR].mean()) > 0.05
    assert metrics[0][names.KL_TO_REFERENCE] == pytest.approx(0, abs=1e-6)
    assert metrics[0][names.ROWS_TRAINED] > 0
    assert 0 < metrics[0][names.SIGNAL_SHARE] <= 1
    assert (names.CRITIC_LOSS in metrics[0]) == (estimator == "gae")


def test_remax_needs_greedy_rewards_and_skips_prompts_without_one(folder: Path, batch: RolloutBatch) -> None:
    learner = load_learner(settings(folder, algorithm={"adv_estimator": "remax"}))

    metrics = learner.learn(batch, baseline_rewards={0: 0.5, 1: math.nan, 3: 0.0})

    assert metrics[names.ROWS_TRAINED] == 16
    with pytest.raises(DataError, match="give baseline_rewards"):
        learner.learn(batch)


def test_truncated_trajectories_are_not_trained(folder: Path) -> None:
    trajectories = [
        structs.replace(t, output=dataclasses.replace(t.output, stop_reason=StopReason.RESPONSE_LENGTH))
        if t.rollout == 0
        else t
        for t in sample_trajectories(tiny_policy(), num_groups=4, n=8)
    ]
    batch = assemble(trajectories, pad_token_id=PAD)
    all_kept = {"drop_zero_variance_groups": False}

    free = load_learner(settings(folder, algorithm=all_kept)).learn(batch)
    bound = load_learner(
        settings(folder, algorithm={**all_kept, "untrained_stop_reasons": ["response_length"]})
    ).learn(batch)

    assert (free[names.ROWS_TRAINED], bound[names.ROWS_TRAINED]) == (32, 28)


@pytest.mark.parametrize("old", ["rollout", "recompute"])
def test_the_kl_penalty_is_subtracted_from_the_reward_of_each_token(
    folder: Path, batch: RolloutBatch, old: str
) -> None:
    """If there is no other reward and the critic predicts 0, an advantage is minus the sum of the later penalties."""
    config = settings(
        folder,
        algorithm={"adv_estimator": "gae", "whiten_advantages": False, "kl_reward_coef": 0.5},
        actor={"old_log_probs": old},
    )
    learner = load_learner(config)
    with torch.no_grad():
        learner.model.get_output_embeddings().weight[REWARDED] *= 4
    flat = batch.clone()
    flat["reward"] = torch.zeros(len(batch))
    flat["rollout_log_probs"] = batch["rollout_log_probs"] + 0.1
    old_BR = flat["rollout_log_probs"]
    if old == "recompute":
        old_BR = Actor(learner.model, config=config.actor).logprobs(batch)
    reference_BR = Actor(tiny_policy(), config=config.actor).logprobs(batch)
    kls = [(old_BR - reference_BR)[row][mask.bool()] for row, mask in enumerate(batch["response_mask"])]
    later_penalties = torch.cat([kl.flip(0).cumsum(0) for kl in kls])

    metrics = learner.learn(flat)

    assert metrics[names.KL_TO_REFERENCE] == pytest.approx(float(torch.cat(kls).mean()), abs=1e-5)
    assert metrics[names.ADVANTAGE_MEAN] == pytest.approx(-0.5 * float(later_penalties.mean()), abs=1e-5)
    assert abs(metrics[names.ADVANTAGE_MEAN]) > 0.01


def test_only_the_critic_is_trained_during_its_warmup(folder: Path, batch: RolloutBatch) -> None:
    learner = load_learner(settings(folder, algorithm={"adv_estimator": "gae"}, critic={"head_start": 2}))
    before = weights(learner)

    alone = [learner.learn(batch) for _ in range(2)]
    still = weights(learner)
    together = learner.learn(batch)

    assert are_equal(before, still)
    assert not are_equal(before, weights(learner))
    assert all(names.CRITIC_LOSS in metrics and names.LOSS not in metrics for metrics in alone)
    assert names.LOSS in together
    assert len({metrics[names.VALUE_MEAN] for metrics in (*alone, together)}) == 3


@pytest.mark.parametrize("model", [{}, {"lora_rank": 2}])
def test_a_checkpoint_contains_all_trained_state(
    folder: Path, batch: RolloutBatch, tmp_path: Path, model: dict[str, Any]
) -> None:
    config = settings(folder, algorithm={"adv_estimator": "gae"}, model=model)
    first = load_learner(config)
    first.learn(batch)
    first.save(tmp_path)
    checkpoint = Checkpoint(path=tmp_path, step=1, config={})

    second = load_learner(config, checkpoint=checkpoint)
    first_metrics, second_metrics = first.learn(batch), second.learn(batch)

    assert second_metrics == pytest.approx(first_metrics, rel=1e-4, abs=1e-6)
    assert second_metrics[names.CRITIC_LOSS] == pytest.approx(first_metrics[names.CRITIC_LOSS], rel=1e-6)
    for name, value in first.weights():
        torch.testing.assert_close(value, weights(second)[name], atol=1e-6, rtol=0)

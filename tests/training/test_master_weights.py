"""A model that computes in bfloat16 is trained in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agent_loop.config import ActorConfig, Config, CriticConfig, ModelConfig
from agent_loop.errors import ConfigError
from agent_loop.rollout.batch import assemble
from agent_loop.training import metrics as names
from agent_loop.training.actor import Actor
from agent_loop.training.advantages.groups import grpo_advantages
from agent_loop.training.checkpoint import Checkpoint
from agent_loop.training.learner import load_learner
from agent_loop.training.policy import compute_dtype
from tests.training.fakes import PAD, REWARDED, sample_trajectories, tiny_policy

BATCH = assemble(sample_trajectories(tiny_policy(), num_groups=4, n=12), pad_token_id=PAD)
ADVANTAGES_BR = grpo_advantages(BATCH["reward"], groups_B=BATCH["group"])[:, None]


def make_actor(dtype: torch.dtype | None, **settings: Any) -> Actor:
    return Actor(tiny_policy(), config=ActorConfig(**{"lr": 1e-3, **settings}), dtype=dtype)


def train(actor: Actor, *, num_updates: int) -> list[dict[str, float]]:
    return [actor.update(BATCH, advantages_BR=ADVANTAGES_BR) for _ in range(num_updates)]


@pytest.mark.parametrize("saves_memory", [False, True])
def test_losses_are_close_to_float32_and_the_policy_learns_as_fast(saves_memory: bool) -> None:
    settings = {"ppo_mini_batches": 2, "gradient_checkpointing": saves_memory}
    full, half = make_actor(None, **settings), make_actor(torch.bfloat16, **settings)
    is_rewarded_BR = (BATCH["responses"] == REWARDED) & BATCH["response_mask"].bool()

    metrics = [train(actor, num_updates=8) for actor in (full, half)]

    assert {value.dtype for _, value in half.weights()} == {torch.bfloat16}
    for ours, expected in zip(*metrics, strict=True):
        assert ours[names.LOSS] == pytest.approx(expected[names.LOSS], abs=0.02)
    first_norms = [of_actor[0][names.GRAD_NORM] for of_actor in metrics]
    assert first_norms[1] == pytest.approx(first_norms[0], rel=0.1)
    gains = [
        float((actor.logprobs(BATCH) - BATCH["rollout_log_probs"])[is_rewarded_BR].mean())
        for actor in (full, half)
    ]
    assert gains[0] > 0.1
    assert gains[1] == pytest.approx(gains[0], rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_on_the_host_are_trained_in_the_same_way(dtype: torch.dtype) -> None:
    on_host, plain = (
        Actor(
            tiny_policy(),
            config=ActorConfig(lr=1e-3, ppo_mini_batches=2, optimizer_on_host=is_on_host),
            dtype=dtype,
        )
        for is_on_host in (True, False)
    )

    metrics = [train(actor, num_updates=2) for actor in (on_host, plain)]

    for found, expected in zip(*metrics, strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    weights = dict(plain.weights())
    for name, value in on_host.weights():
        torch.testing.assert_close(value, weights[name], atol=1e-4, rtol=1e-2)
    assert all(parameter.grad is None for parameter in on_host.model.parameters())


def test_steps_too_small_for_bfloat16_add_up() -> None:
    """A weight of 1 changes by 1e-4 per step, which is below the precision of bfloat16."""
    actor = make_actor(torch.bfloat16, lr=1e-4)
    name = "model.norm.weight"

    train(actor, num_updates=1)
    after_one = dict(actor.weights())[name].clone()
    train(actor, num_updates=60)

    assert torch.equal(after_one, torch.ones_like(after_one))
    assert not torch.equal(dict(actor.weights())[name], after_one)


def test_a_checkpoint_has_float32_weights_and_training_resumes_with_them(tmp_path: Path) -> None:
    tiny_policy().save_pretrained(tmp_path / "base")
    config = Config.model_validate(
        {
            "model": {"path": str(tmp_path / "base"), "device": "cpu", "dtype": "bfloat16"},
            "actor": ActorConfig(lr=1e-3).model_dump(),
            "critic": CriticConfig(lr=1e-3).model_dump(),
            "algorithm": {"adv_estimator": "gae"},
        }
    )
    first = load_learner(config)
    first.learn(BATCH)
    first.save(tmp_path)
    checkpoint = Checkpoint(path=tmp_path, step=1, config={})

    second = load_learner(config, checkpoint=checkpoint)

    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).state_dict()
    assert any(not torch.equal(value, value.bfloat16().float()) for value in saved.values())
    assert first.learn(BATCH) == second.learn(BATCH)
    weights = dict(second.weights())
    assert all(torch.equal(value, weights[name]) for name, value in first.weights())


def test_an_unsupported_training_dtype_is_refused(tmp_path: Path) -> None:
    tiny_policy().half().save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match=r"model\.dtype is auto, but .* has torch\.float16"):
        compute_dtype(ModelConfig(path=str(tmp_path), dtype="auto"))

"""Micro-batches that are computed concurrently have the same results as in sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agent_loop.config import ActorConfig, CriticConfig, ModelConfig
from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.training.actor import Actor
from agent_loop.training.advantages.groups import grpo_advantages
from agent_loop.training.critic import Critic, load_critic
from agent_loop.training.policy import load_policy
from tests.training.fakes import PAD, sample_trajectories, tiny_policy

MAX_TOKENS = 60
"""Small enough for more micro-batches than threads, so that the number of threads does not change the split."""


@pytest.fixture(scope="module")
def batch() -> RolloutBatch:
    return assemble(sample_trajectories(tiny_policy(), num_groups=4, n=6), pad_token_id=PAD)


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    tiny_policy().save_pretrained(folder)
    return folder


def trained(
    batch: RolloutBatch, folder: Path, *, num_threads: int, lora_rank: int, dtype: torch.dtype, settings: Any
) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Return the weights and the metrics of two updates."""
    torch.manual_seed(0)
    actor = Actor(
        load_policy(ModelConfig(path=str(folder), device="cpu", lora_rank=lora_rank), seed=1),
        config=ActorConfig(
            lr=1e-2,
            ppo_mini_batches=2,
            entropy_coeff=0.01,
            **{"max_tokens_per_micro_batch": MAX_TOKENS, **settings},
        ),
        dtype=dtype,
        num_threads=num_threads,
    )
    advantages_BR = grpo_advantages(batch["reward"], groups_B=batch["group"])[:, None]
    metrics = [actor.update(batch, advantages_BR=advantages_BR) for _ in range(2)]
    return {name: weight.clone() for name, weight in actor.model.named_parameters()}, metrics


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
    ("settings", "lora_rank", "dtype"),
    [
        ({}, 0, torch.float32),
        ({"old_log_probs": "recompute"}, 0, torch.float32),
        ({"share_prefixes": True}, 0, torch.float32),
        ({"share_prefixes": True, "max_tokens_per_micro_batch": 25}, 0, torch.float32),
        ({"gradient_checkpointing": True}, 0, torch.float32),
        ({}, 0, torch.bfloat16),
        ({}, 2, torch.float32),
    ],
)
def test_threads_train_the_same_weights_bit_by_bit(
    batch: RolloutBatch, policy_folder: Path, settings: dict[str, Any], lora_rank: int, dtype: torch.dtype
) -> None:
    weights, metrics = trained(
        batch, policy_folder, num_threads=1, lora_rank=lora_rank, dtype=dtype, settings=settings
    )

    for num_threads in (2, 3):
        again, metrics_again = trained(
            batch, policy_folder, num_threads=num_threads, lora_rank=lora_rank, dtype=dtype, settings=settings
        )
        assert metrics_again == metrics
        assert all(torch.equal(again[name], weight) for name, weight in weights.items())


def test_a_critic_trained_in_threads_is_the_same(batch: RolloutBatch, policy_folder: Path) -> None:
    def critic_of(num_threads: int) -> tuple[Tensor, dict[str, float]]:
        model = load_critic(CriticConfig(), model_config=ModelConfig(path=str(policy_folder), device="cpu"))
        critic = Critic(
            model,
            config=CriticConfig(lr=1e-2, max_tokens_per_micro_batch=MAX_TOKENS),
            num_threads=num_threads,
        )
        rows = torch.arange(len(batch))
        returns_BR = torch.ones(batch["responses"].shape)
        metrics = critic.update(batch, returns_BR=returns_BR, old_values_BR=critic.values(batch, rows=rows))
        return critic.values(batch, rows=rows), metrics

    values_BR, metrics = critic_of(1)
    again_BR, metrics_again = critic_of(3)

    assert values_BR.any()
    assert torch.equal(again_BR, values_BR)
    assert metrics_again == metrics


def test_a_mini_batch_within_the_budget_is_split_for_the_threads(
    batch: RolloutBatch, policy_folder: Path
) -> None:
    """The split differs, so the rounding of the sums differs too."""
    options: dict[str, Any] = {"max_tokens_per_micro_batch": 100_000, "share_prefixes": True, "lr": 1e-3}
    advantages_BR = grpo_advantages(batch["reward"], groups_B=batch["group"])[:, None]
    losses: list[Tensor] = []
    for num_threads in (1, 4):
        actor = Actor(tiny_policy(), config=ActorConfig(**options), num_threads=num_threads)
        metrics = actor.update(batch, advantages_BR=advantages_BR)
        losses.append(torch.tensor([metrics["actor/loss"], metrics["actor/grad_norm"]]))

    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-7)

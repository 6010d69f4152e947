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
from agent_loop.training.master_weights import MasterWeights
from agent_loop.training.micro_batches import MicroBatch, micro_batches
from agent_loop.training.passes import add_gradients, compute_each
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


def parts_of(batch: RolloutBatch) -> list[MicroBatch]:
    rows = torch.arange(len(batch))
    return list(micro_batches(batch, rows=rows, max_tokens=MAX_TOKENS, device=torch.device("cpu")))


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
        ({"use_packing": True}, 0, torch.float32),
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
    options: dict[str, Any] = {"max_tokens_per_micro_batch": 100_000, "use_packing": True, "lr": 1e-3}
    advantages_BR = grpo_advantages(batch["reward"], groups_B=batch["group"])[:, None]
    losses: list[Tensor] = []
    for num_threads in (1, 4):
        actor = Actor(tiny_policy(), config=ActorConfig(**options), num_threads=num_threads)
        metrics = actor.update(batch, advantages_BR=advantages_BR)
        losses.append(torch.tensor([metrics["actor/loss"], metrics["actor/grad_norm"]]))

    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-7)


def test_an_error_in_a_thread_is_raised_and_earlier_gradients_are_kept(batch: RolloutBatch) -> None:
    parts = parts_of(batch)
    weight = torch.nn.Parameter(torch.ones(3))

    def loss_of(micro_batch: MicroBatch) -> tuple[Tensor, int]:
        if micro_batch is parts[2]:
            raise RuntimeError("not enough memory")
        return weight.sum(), len(micro_batch.rows_B)

    seen: list[int] = []
    with pytest.raises(RuntimeError, match="not enough memory"):
        for _, found in add_gradients(
            loss_of, parts, into=MasterWeights({"weight": weight}, {}), num_threads=2
        ):
            seen.append(found)

    assert seen == [len(part.rows_B) for part in parts[:2]]
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]


def test_weights_that_no_loss_depends_on_get_no_gradient_and_gradients_are_not_shared(
    batch: RolloutBatch,
) -> None:
    left, right, apart = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    weights = MasterWeights({"left": left, "right": right, "apart": apart}, {})

    for _ in add_gradients(
        lambda _: ((left + right).sum(), None), parts_of(batch)[:3], into=weights, num_threads=2
    ):
        pass

    assert apart.grad is None
    assert left.grad is not None
    assert right.grad is not None
    assert left.grad.tolist() == right.grad.tolist() == [3.0, 3.0]


def test_each_micro_batch_is_yielded_with_its_result(batch: RolloutBatch) -> None:
    parts = parts_of(batch)

    for num_threads in (1, 3):
        found = compute_each(lambda part: int(part.rows_B[0]), parts, num_threads=num_threads)
        assert [(id(part), row) for part, row in found] == [(id(p), int(p.rows_B[0])) for p in parts]

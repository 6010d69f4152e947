"""Servers get the weights of each expert under the names of the model's files, and then compute as the trainer does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from agent_loop.config import ActorConfig, ModelConfig
from agent_loop.rollout.batch import assemble
from agent_loop.servers.base import AsyncServerBase
from agent_loop.servers.embedded import EmbeddedConfig, EmbeddedServer
from agent_loop.training.actor import Actor
from agent_loop.training.advantages.groups import grpo_advantages
from agent_loop.training.policy import load_policy
from agent_loop.types import SamplingParams
from agent_loop.weights import AdaptedWeights
from tests.training.fakes import PAD, VOCABULARY, sample_trajectories, tiny_policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = tiny_policy().config.to_dict() | {"model_type": "qwen3_moe", "architectures": None}
    experts = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("experts")
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes | experts)).save_pretrained(path)
    return path


def trained(folder: Path, *, path: Path | None = None, **changes: Any) -> Actor:
    """Return an actor after one update of the model, or of a checkpoint."""
    config = ModelConfig(path=str(folder), device="cpu", **changes)
    actor = Actor(load_policy(config, path=path, seed=3), config=ActorConfig(lr=1e-2))
    batch = assemble(sample_trajectories(tiny_policy()), pad_token_id=PAD)
    advantages_BR = grpo_advantages(batch["reward"], groups_B=batch["group"])[:, None]
    actor.update(batch, advantages_BR=advantages_BR)
    return actor


ADAPTERS = {"lora_rank": 4, "target_modules": ["q_proj", "v_proj"]}


async def largest_error(server: AsyncServerBase, actor: Actor) -> float:
    """Publish the actor's weights, and return the largest difference of a log-prob before and after."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, VOCABULARY, (9,), generator=generator).tolist()
    before = await server.generate(prompt, SamplingParams(max_tokens=12, seed=1), "before")
    await server.update_weights(actor.weights(), weight_version=1)
    after = await server.generate(prompt, SamplingParams(max_tokens=12, seed=1), "after")
    assert after.weight_version == 1
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *after.token_ids]])
        logits_TV = actor.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    expected_T = logits_TV.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
    assert before.log_probs is not None
    assert after.log_probs is not None
    assert list(before.log_probs) != pytest.approx(list(after.log_probs), abs=1e-3)
    return float((torch.as_tensor(after.log_probs) - expected_T).abs().max())


@pytest.mark.parametrize("changes", [{}, ADAPTERS], ids=["all weights", "adapters"])
def test_published_weights_are_those_that_a_checkpoint_of_the_merged_model_has(
    folder: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    actor = trained(folder, **changes)
    published = dict(actor.weights())
    assert isinstance(actor.weights(), AdaptedWeights) == bool(changes)
    assert published.keys() == load_file(folder / "model.safetensors").keys()
    actor.save(tmp_path)
    assert dict(trained(folder, path=tmp_path, **changes).weights()).keys() == published.keys()
    if not changes:
        saved = load_file(tmp_path / "model.safetensors")
        assert all(torch.equal(published[name], saved[name]) for name in saved)


@pytest.mark.parametrize("changes", [{}, ADAPTERS], ids=["all weights", "adapters"])
def test_the_embedded_engine_computes_with_published_experts(folder: Path, changes: dict[str, Any]) -> None:
    async def main() -> None:
        server = EmbeddedServer.from_pretrained(folder, config=EmbeddedConfig(max_model_len=64))
        assert await largest_error(server, trained(folder, **changes)) < 1e-5
        await server.close()

    asyncio.run(main())

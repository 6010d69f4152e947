"""Servers get the weights of each expert under the names of the model's files, and then compute as the trainer does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from agent_loop.config import ActorConfig, ModelConfig
from agent_loop.rollout.batch import assemble
from agent_loop.training.actor import Actor
from agent_loop.training.advantages.groups import grpo_advantages
from agent_loop.training.policy import load_policy
from agent_loop.weights.adapted import AdaptedWeights
from tests.training.fakes import PAD, sample_trajectories, tiny_policy


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

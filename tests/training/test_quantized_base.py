"""Adapters on base weights in 4 bits: servers get the weights that the trainer computes with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from agent_loop.config import ActorConfig, Config, ModelConfig, parse_section
from agent_loop.errors import ConfigError
from agent_loop.rollout.batch import assemble
from agent_loop.servers.embedded.weights import load_weights
from agent_loop.training.actor import Actor
from agent_loop.training.advantages.groups import grpo_advantages
from agent_loop.training.checkpoint import MODEL_FOLDER, Checkpoint
from agent_loop.training.export import export_model
from agent_loop.training.policy import load_policy
from agent_loop.weights.adapted import AdaptedWeights
from tests.training.fakes import PAD, VOCABULARY, sample_trajectories, tiny_policy, tiny_tokenizer

IDS = torch.randint(3, VOCABULARY, (1, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    pytest.importorskip("bitsandbytes", reason='needs pip install "agent-loop[bitsandbytes]"')
    # as on a CPU with AVX-512 BF16, which repacks the weights for inference and refuses the widths of this model
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    tiny_policy().save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    return ModelConfig(path=str(tmp_path / "base"), device="cpu", lora_rank=4, base_bits=4)


def trained(config: ModelConfig, path: Path | None = None) -> Actor:
    actor = Actor(load_policy(config, path=path, seed=3), config=ActorConfig(lr=1e-2))
    batch = assemble(sample_trajectories(tiny_policy()), pad_token_id=PAD)
    advantages_BR = grpo_advantages(batch["reward"], groups_B=batch["group"])[:, None]
    actor.update(batch, advantages_BR=advantages_BR)
    return actor


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=IDS).logits


def test_servers_and_an_export_compute_what_the_trainer_computes(config: ModelConfig, tmp_path: Path) -> None:
    actor = trained(config)
    assert sum(parameter.dtype == torch.uint8 for parameter in actor.model.parameters()) == 2 * 7
    published = actor.weights()
    assert isinstance(published, AdaptedWeights)
    server = tiny_policy(seed=1)
    load_weights(server, dict(published))
    torch.testing.assert_close(logits(server), logits(actor.model), atol=1e-5, rtol=0)
    assert (logits(tiny_policy()) - logits(actor.model)).abs().max() > 1e-3

    actor.save(tmp_path / MODEL_FOLDER)
    tiny_tokenizer().save_pretrained(tmp_path / MODEL_FOLDER)
    again = Actor(load_policy(config, path=tmp_path / MODEL_FOLDER), config=ActorConfig())
    assert torch.equal(logits(again.model), logits(actor.model))
    checkpoint = Checkpoint(
        path=tmp_path,
        step=1,
        config={"model": config.model_dump()},
    )
    export_model(checkpoint, tmp_path / "exported")
    exported: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    torch.testing.assert_close(logits(exported), logits(actor.model), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": {"base_bits": 4}}, "model.lora_rank is 0, and weights of 4 bits cannot be trained"),
        (
            {"model": {"base_bits": 4, "lora_rank": 8}, "trainer": {"num_processes": 2}},
            "would shard the weights",
        ),
        ({"model": {"base_bits": 3, "lora_rank": 8}}, "model.base_bits is 3"),
    ],
)
def test_a_base_of_few_bits_needs_adapters_and_a_single_process(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_section(Config, values, where="test")

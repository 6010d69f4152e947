"""Servers get a model with adapters as a base and factors, or as merged weights if factors cannot express it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from agent_loop.config import ActorConfig, ModelConfig
from agent_loop.rollout.batch import assemble
from agent_loop.training.actor import Actor
from agent_loop.training.adapters import merged_parameters
from agent_loop.training.advantages.groups import grpo_advantages
from agent_loop.training.policy import load_policy
from agent_loop.weights.adapted import AdaptedWeights
from agent_loop.weights.receiver import WeightReceiver
from agent_loop.weights.sender import WeightSender
from tests.training.fakes import PAD, sample_trajectories, tiny_policy
from tests.weights.receiving import flat

NAME = "model.layers.0.mlp.up_proj.weight"


def actor_of(tmp_path: Path, *, dtype: torch.dtype | None = None) -> Actor:
    tiny_policy().save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), device="cpu", lora_rank=4, lora_alpha=8.0)
    return Actor(load_policy(config, seed=3), config=ActorConfig(lr=1e-2), dtype=dtype)


def train(actor: Actor) -> None:
    batch = assemble(sample_trajectories(tiny_policy()), pad_token_id=PAD)
    advantages_BR = grpo_advantages(batch["reward"], groups_B=batch["group"])[:, None]
    actor.update(batch, advantages_BR=advantages_BR)


def adapted(actor: Actor) -> AdaptedWeights:
    weights = actor.weights()
    assert isinstance(weights, AdaptedWeights)
    return weights


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=40, n_positions=16))


def with_adapters(model: PreTrainedModel, names: list[str], **options: Any) -> PreTrainedModel:
    """Add an adapter with random weights for each name."""
    for name in names:
        settings = peft.LoraConfig(
            r=3,
            lora_alpha=7,
            target_modules=["c_attn", "wte"],
            fan_in_fan_out=True,
            init_lora_weights=False,
            **options,
        )
        model.add_adapter(settings, adapter_name=name)
    model.set_adapter(names)
    return model


def assert_merged(weights: AdaptedWeights, model: PreTrainedModel) -> None:
    """Check that the weights equal the weights that `peft` merges."""
    expected = dict(merged_parameters(model))
    for name, tensor in weights:
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-5)


def test_the_base_is_unchanged_by_training_and_the_factors_are_current(tmp_path: Path) -> None:
    actor = actor_of(tmp_path)
    first = adapted(actor)
    before = flat(first)
    train(actor)
    second = adapted(actor)
    assert second.base_id == first.base_id
    assert flat(second) != before == flat(first)
    assert_merged(second, actor.model)
    assert second.base[NAME].data_ptr() == dict(tiny_named(actor.model))[NAME].data_ptr()
    with WeightSender("shared_memory") as sender, sender.offer(second, weight_version=2) as handle:
        assert flat(WeightReceiver().receive(handle.to_json())) == flat(second)


def tiny_named(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name.replace(".base_layer.", "."), value) for name, value in model.named_parameters()]


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
@pytest.mark.parametrize("names", [["one"], ["one", "other"]])
def test_embeddings_transposed_layers_and_several_adapters_are_sent_as_factors(names: list[str]) -> None:
    model = with_adapters(gpt2(), names)
    weights = adapted(Actor(model, config=ActorConfig()))
    left_OR, right_RI = weights.factors["transformer.h.0.attn.c_attn.weight"]
    assert (left_OR.shape, right_RI.shape) == ((32, 3 * len(names)), (3 * len(names), 96))
    assert "transformer.wte.weight" in weights.factors
    assert_merged(weights, model)


def test_a_convolution_is_sent_merged() -> None:
    class Convolved(GPT2LMHeadModel):
        def __init__(self, config: GPT2Config) -> None:
            super().__init__(config)
            self.conv = nn.Conv1d(4, 4, 3)

    model = Convolved(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=40, n_positions=16))
    model.add_adapter(peft.LoraConfig(r=3, target_modules=["conv"], init_lora_weights=False))
    before = model.conv.base_layer.weight.detach().clone()
    weights = Actor(model, config=ActorConfig()).weights()
    assert not isinstance(weights, AdaptedWeights)
    assert not torch.equal(dict(weights)["conv.weight"], before)

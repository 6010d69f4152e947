"""Rows are batched for training only in ways that do not change the outputs of any row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForTokenClassification, PreTrainedModel

from agent_loop.config import ActorConfig, CriticConfig
from agent_loop.errors import ConfigError
from agent_loop.training.actor import Actor
from agent_loop.training.batching_proof import prove_batching
from agent_loop.training.critic import Critic
from agent_loop.training.policy import make_exact
from tests.families.batches import check_logprobs, ragged_batch
from tests.families.zoo import FAMILIES
from tests.training.fakes import tiny_policy

PACKED, SHARED = {"use_packing": True}, {"share_prefixes": True}


def build(name: str) -> PreTrainedModel:
    model = FAMILIES[name].build()
    make_exact(model, gradient_checkpointing=False)
    return model


def prove(model: PreTrainedModel, *, max_row_tokens: int = 128, **settings: Any) -> bool:
    return prove_batching(
        model, config=ActorConfig(**settings), section="actor", max_row_tokens=max_row_tokens
    )


@pytest.mark.parametrize("settings", [{}, PACKED, SHARED])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_with_full_attention_is_batched_in_any_way(attention: str, settings: dict[str, bool]) -> None:
    model: Any = tiny_policy()
    model.set_attn_implementation(attention)
    assert prove(model, **settings)


@pytest.mark.parametrize(
    ("name", "settings", "fault"),
    [
        ("gpt_neo-window", SHARED, ".*GPTNeoForCausalLM has an attention that cannot be exchanged"),
        ("lfm3", PACKED, "use_packing is on, but with it Lfm3ForCausalLM computes rows of up to"),
        ("lfm3", SHARED, "share_prefixes is on"),
        ("rwkv", PACKED, "use_packing is on"),
        ("deepseek_v4", PACKED, "use_packing is on"),
        ("llama4_text-chunk", SHARED, "share_prefixes is on"),
        ("llama4_text-temperature", PACKED, "use_packing is on"),
        ("mamba", PACKED, r".*set actor\.use_packing=false"),
        ("mamba", SHARED, r".*state runs from token to token.*set actor\.share_prefixes=false"),
    ],
)
def test_batching_that_is_not_exact_is_refused(name: str, settings: dict[str, bool], fault: str) -> None:
    with pytest.raises(ConfigError, match=rf"^actor\.{fault}"):
        prove(build(name), **settings)


@pytest.mark.parametrize("name", ["rwkv", "deepseek_v4", "llama4_text-temperature", "xlstm"])
def test_a_model_that_padding_changes_is_trained_one_row_at_a_time(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = FAMILIES[name].build()
    actor = Actor(model, config=ActorConfig(max_tokens_per_micro_batch=10_000), max_row_tokens=128)
    [message] = [record.getMessage() for record in caplog.records if record.name.startswith("agent_loop.")]
    assert message.startswith("actor: each row is computed in a forward of its own, which is slower")
    batch = ragged_batch(limits=FAMILIES[name].limits)
    check_logprobs(actor.logprobs(batch), model, batch)


@pytest.mark.parametrize("name", ["gpt_neo-window", "llama4_text-chunk", "gemma3_text-window"])
def test_attention_windows_and_chunks_are_tested_with_rows_that_exceed_them(name: str) -> None:
    for settings in ({}, PACKED, SHARED) if name == "gemma3_text-window" else ({}, PACKED):
        model: Any = FAMILIES[name].build()
        actor = Actor(model, config=ActorConfig(**settings), max_row_tokens=128)
        batch = ragged_batch(limits=FAMILIES[name].limits)
        check_logprobs(actor.logprobs(batch), model, batch)


def test_attention_windows_longer_than_every_row_are_ignored() -> None:
    model = build("gemma3_text-window")
    longest = min(FAMILIES["gemma3_text-window"].limits)
    assert prove(model, max_row_tokens=longest, **SHARED)


def test_a_forward_that_fails_is_named() -> None:
    model: Any = tiny_policy()

    def fail(*_: Any) -> None:
        raise RuntimeError("no kernel")

    model.model.layers[0].register_forward_hook(fail)
    with pytest.raises(
        ConfigError, match=r"^actor: \w+ cannot be trained: its forward fails with RuntimeError: no kernel"
    ):
        prove(model)


def test_a_critic_is_tested_below_its_head() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_labels=1,
    )
    model: Any = LlamaForTokenClassification(config).eval()
    torch.nn.init.zeros_(model.score.weight)
    assert prove(model, **PACKED)
    # The hook adds the output of the previous token in the input, which may belong to another row.
    model.model.layers[0].register_forward_hook(lambda module, args, output: output + output.roll(1, dims=1))
    with pytest.raises(ConfigError, match=r"^critic\.use_packing is on"):
        Critic(model, config=CriticConfig(use_packing=True))

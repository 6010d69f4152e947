"""Packed rows have the same outputs as rows that are computed alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel

from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.training.micro_batches import MicroBatch, micro_batches
from agent_loop.training.packing import pack
from agent_loop.training.policy import response_logprobs
from tests.training.fakes import PAD, VOCABULARY, Plan, sample, sample_trajectories, tiny_policy


@pytest.fixture(scope="module")
def batch() -> RolloutBatch:
    return assemble(sample_trajectories(tiny_policy()), pad_token_id=PAD, prompt_width=9, response_width=12)


def cut(batch: RolloutBatch, *, max_tokens: int) -> list[MicroBatch]:
    rows, device = torch.arange(len(batch)), torch.device("cpu")
    return list(micro_batches(batch, rows=rows, max_tokens=max_tokens, device=device, use_packing=True))


def sliding_window_model() -> PreTrainedModel:
    """Return a model with a sliding window of four tokens in every second layer."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=4,
        sliding_window_pattern=2,
        max_position_embeddings=64,
    )
    return Gemma3ForCausalLM(config).eval()


@pytest.mark.parametrize("max_tokens", [1, 20, 60, 10_000])
def test_every_row_is_in_one_packed_row_and_packed_rows_keep_to_the_budget(
    batch: RolloutBatch, max_tokens: int
) -> None:
    parts = cut(batch, max_tokens=max_tokens)

    assert sorted(torch.cat([part.rows_B for part in parts]).tolist()) == list(range(len(batch)))
    for part in parts:
        packed = pack(part)
        assert sorted(row for line in part.lines for row in line) == list(range(len(part.rows_B)))
        assert packed.input_ids_KL.numel() <= max_tokens or len(part.rows_B) == 1
        after_M = packed.input_ids_KL.flatten()[packed.before_M + 1]
        assert torch.equal(after_M, part.response_ids_BR[part.mask_BR.bool()])


def test_packing_leaves_less_padding() -> None:
    generator = torch.Generator().manual_seed(0)
    prompt = {"raw_prompt": [{"role": "user", "content": "4 5 6"}]}
    lengths = [(15, 12), (2, 2), (9, 6), (1, 1), (3, 1), (7, 2), (1, 2), (5, 5)]
    ragged = sample(tiny_policy(), [Plan(prompt, num_tokens=pair) for pair in lengths], generator=generator)
    batch = assemble(ragged, pad_token_id=PAD)
    rows, device = torch.arange(len(batch)), torch.device("cpu")
    num_tokens = int(batch["attention_mask"].sum())

    padded = micro_batches(batch, rows=rows, max_tokens=100, device=device)
    num_packed = sum(pack(part).input_ids_KL.numel() for part in cut(batch, max_tokens=100))

    assert num_packed < 1.1 * num_tokens
    assert sum(part.input_ids_BW.numel() for part in padded) > 1.25 * num_tokens


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_logprobs_of_packed_rows_equal_those_of_padded_rows(
    batch: RolloutBatch, kind: str, attention: str
) -> None:
    model: Any = tiny_policy() if kind == "full" else sliding_window_model()
    model.set_attn_implementation(attention)
    for part in cut(batch, max_tokens=60):
        packed = response_logprobs(model, part, temperature=0.8)
        [padded_part] = micro_batches(batch, rows=part.rows_B, max_tokens=10_000, device=torch.device("cpu"))
        padded = response_logprobs(model, padded_part, temperature=0.8)
        assert torch.equal(part.rows_B, padded_part.rows_B)
        for packed_BR, padded_BR in (
            (packed.sampled_BR, padded.sampled_BR),
            (packed.entropy_BR, padded.entropy_BR),
        ):
            torch.testing.assert_close(packed_BR, padded_BR, atol=1e-5, rtol=0)
            assert packed_BR[part.mask_BR.bool()].all()
            assert not packed_BR[~part.mask_BR.bool()].any()

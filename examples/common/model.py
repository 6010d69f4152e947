"""Transformer that is small enough to train from scratch on one CPU core in seconds."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.common.tokenizer import end_id, pad_id

MAX_POSITIONS = 512


def make_model(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> Qwen3ForCausalLM:
    """Return a Qwen3 model with two layers of width 64 and random weights."""
    end, pad = end_id(tokenizer), pad_id(tokenizer)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        # With the usual 0.02, the attention of such a narrow model is almost uniform, and it learns far more slowly.
        initializer_range=0.06,
        eos_token_id=end,
        pad_token_id=pad,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = end
    model.generation_config.pad_token_id = pad
    return model

"""Transformers that are small enough to train from scratch on one CPU core."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agent_loop.tiny_models.tokenizer import end_id, pad_id

MAX_POSITIONS = 4096


class Size(StrEnum):
    """Size of a model."""

    TINY = "tiny"
    """Two layers of width 64, about 150,000 parameters. Trains in seconds."""
    SMALL = "small"
    """Four layers of width 256, about 4,000,000 parameters. Trains in minutes."""

    @property
    def vocabulary(self) -> int:
        """Largest number of tokens."""
        return _SHAPES[self].vocabulary


@dataclass(frozen=True, slots=True)
class _Shape:
    vocabulary: int
    hidden_size: int
    num_layers: int
    num_heads: int
    initializer_range: float
    """With the usual 0.02, the attention of a narrow model is almost uniform, and it learns far more slowly."""


_SHAPES = {
    Size.TINY: _Shape(vocabulary=768, hidden_size=64, num_layers=2, num_heads=4, initializer_range=0.06),
    Size.SMALL: _Shape(vocabulary=4096, hidden_size=256, num_layers=4, num_heads=8, initializer_range=0.03),
}


def make_model(tokenizer: PreTrainedTokenizerFast, *, seed: int, size: Size = Size.TINY) -> Qwen3ForCausalLM:
    """Return a Qwen3 model with random weights."""
    end, pad, shape = end_id(tokenizer), pad_id(tokenizer), _SHAPES[size]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=3 * shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        head_dim=shape.hidden_size // shape.num_heads,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=shape.initializer_range,
        eos_token_id=end,
        pad_token_id=pad,
    )
    cast(Any, torch).manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = end
    model.generation_config.pad_token_id = pad
    return model

"""Tests of the length limits that are read from a model's configuration."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    DeepseekV4Config,
    Gemma3Config,
    GPTNeoConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    Mamba2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
)
from transformers.models.llama4 import Llama4Config

from agent_loop.servers.embedded.length_limits import LengthLimit, length_limits


def limits(config: Any) -> dict[str, int]:
    return {limit.name: limit.length for limit in length_limits(config)}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Qwen2Config(use_sliding_window=True, sliding_window=8), {"sliding_window": 8}),
        (GPTNeoConfig(window_size=6), {"window_size": 6}),
        (RecurrentGemmaConfig(attention_window_size=9), {"conv1d_width": 4, "attention_window_size": 9}),
        (Lfm2Config(conv_L_cache=3), {"conv_L_cache": 3}),
        (Mamba2Config(conv_kernel=4, chunk_size=16), {"conv_kernel": 4, "chunk_size": 16}),
        (Qwen3NextConfig(linear_conv_kernel_dim=4), {"linear_conv_kernel_dim": 4}),
        (
            GptOssConfig(sliding_window=8),
            {"sliding_window": 8, "rope_parameters.original_max_position_embeddings": 4096},
        ),
        (Phi3Config(original_max_position_embeddings=32), {"original_max_position_embeddings": 32}),
        (
            Llama4Config(text_config={"attention_chunk_size": 8, "floor_scale": 12}),
            {"text_config.attention_chunk_size": 8, "text_config.floor_scale": 12},
        ),
        (Gemma3Config(text_config={"sliding_window": 7}), {"text_config.sliding_window": 7}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_limits_are_read_from_every_field(config: Any, expected: dict[str, int]) -> None:
    found = limits(config)

    assert found == expected
    assert list(found.values()) == sorted(found.values())


def test_sparse_attention_also_changes_at_the_length_that_its_entries_no_longer_cover() -> None:
    config = DeepseekV4Config(
        sliding_window=8,
        index_topk=6,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    )

    assert {limit.length for limit in length_limits(config)} == {4, 6, 8, 16, 24, 96}


def test_lists_per_layer_and_nested_dictionaries_are_read() -> None:
    fields = {
        "sliding_window": [4, None, 6, 4],
        "inner": {"deeper": {"mamba_chunk_size": 5}},
        "rope_scaling": {"full": {"original_max_position_embeddings": 7}},
    }

    assert length_limits(fields) == (
        LengthLimit("sliding_window", 4),
        LengthLimit("inner.deeper.mamba_chunk_size", 5),
        LengthLimit("sliding_window", 6),
        LengthLimit("rope_scaling.full.original_max_position_embeddings", 7),
    )


def test_fields_that_are_not_text_lengths_are_ignored() -> None:
    fields = {
        "sliding_window": None,
        "chunk_size": 0,
        "attention_window_size": -1,
        "block_size": True,
        "max_window_layers": 28,
        "sliding_window_pattern": 4,
        "topk_group": 2,
        "vision_config": {"window_size": 14},
    }

    assert length_limits(fields) == ()
    assert length_limits(LlamaConfig()) == ()


def test_a_window_counts_even_if_it_is_switched_off() -> None:
    # A mapping, because Qwen2Config removes the number if the window is switched off.
    assert limits({"use_sliding_window": False, "sliding_window": 8}) == {"sliding_window": 8}

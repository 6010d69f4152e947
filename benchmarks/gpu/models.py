"""Random models: a small one for exact comparisons, and sizes up to 4B weights for memory and speed."""

from __future__ import annotations

from typing import Any

import torch
from transformers import MistralConfig, PretrainedConfig, Qwen3Config

SMALL: dict[str, Any] = {
    "vocab_size": 2000,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Sizes of the small model. Its weights are large enough that two tokens rarely have equal logits."""
TINY: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "initializer_range": 0.15,
}
"""Sizes on a CPU, where they differ."""
QWEN3: dict[str, dict[str, Any]] = {
    "4B": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "1.7B": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
}
"""Sizes of Qwen3 models, largest first."""
OF_ALL_QWEN3: dict[str, Any] = {
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}

USABLE_SHARE = 0.85
"""Share of the free memory that weights, cache or a plan may take."""


def small_sizes(device: torch.device) -> dict[str, Any]:
    """Return the sizes of the small model on a device."""
    return {**SMALL, **(TINY if device.type == "cpu" else {})}


def small_model_sizes(device: torch.device) -> dict[str, Any]:
    """Return the sizes of the small model, as its `config.json` states them."""
    return {"model_type": "qwen3", **small_sizes(device)}


def small_config(device: torch.device, **changes: Any) -> Qwen3Config:
    """Return the configuration of a small Qwen3 model."""
    return Qwen3Config(**{**small_sizes(device), **changes})


def windowed_config(device: torch.device, *, window: int) -> MistralConfig:
    """Return the configuration of a small Mistral model with a sliding window."""
    return MistralConfig(**small_sizes(device), sliding_window=window)


def qwen3_sizes(name: str) -> dict[str, Any]:
    """Return the sizes of a Qwen3 model, as its `config.json` states them."""
    return {"model_type": "qwen3", **OF_ALL_QWEN3, **QWEN3[name]}


def config_of(sizes: dict[str, Any]) -> PretrainedConfig:
    """Return the configuration with the sizes of a `config.json`."""
    from transformers import AutoConfig

    known: Any = AutoConfig
    return known.for_model(**sizes)


def flops_per_token(model: Any, *, context: float) -> float:
    """Return the operations of a forward pass per token, with so many tokens of context on average."""
    config = model.config
    embedding = model.get_input_embeddings().weight
    num_weights = sum(weight.numel() for weight in model.parameters())
    if not config.tie_word_embeddings:
        num_weights -= embedding.numel()  # looking up a row is no product; a tied one is the head's too
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * context
    return 2 * num_weights + attention


def random_model(
    config: PretrainedConfig, *, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Any:
    """Create a model with random weights on its device."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    make: Any = AutoModelForCausalLM
    with device:
        return make.from_config(config, dtype=dtype).eval()


def copy_of(model: Any, *, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a copy of a model on another device or in another dtype."""
    import copy

    return copy.deepcopy(model).to(device=device, dtype=dtype)

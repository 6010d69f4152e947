"""Base weights of adapters in 4 bits (QLoRA, arXiv 2305.14314), by `bitsandbytes`.

The model computes with the dequantised weights, which differ from those of its files. Servers get the dequantised
weights too, so that trainer and servers agree.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

from agent_loop.errors import ConfigError


def quantized_loading(*, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the options of `from_pretrained` that load linear layers in 4 bits. The head and embeddings stay as
    they are.

    Args:
        device: Device to load the model to.
        dtype: Dtype that the model computes in.

    Raises:
        ConfigError: `bitsandbytes` or `accelerate` is not installed.
    """
    missing = [name for name in ("bitsandbytes", "accelerate") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            'model.base_bits=4 needs: pip install "agent-loop[bitsandbytes]" '
            f"({' and '.join(missing)} missing)"
        )
    settings: Any = cast(Any, BitsAndBytesConfig)(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": settings, "device_map": {"": str(device)}}


def keep_layout(model: nn.Module) -> None:
    """Keep weights of 4 bits in their layout on a CPU with AVX-512 BF16.

    `bitsandbytes` would repack them there at the first forward without a gradient. Repacked weights have no backward
    pass and no inverse that `dequantized` knows, and exist only for some widths.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            cast(Any, module).support_avx512bf16_for_cpu = False


def is_quantized(weight: Tensor) -> bool:
    """Return whether a parameter is in 4 bits."""
    return getattr(weight, "quant_state", None) is not None


def dequantized(weight: Tensor) -> Tensor:
    """Return a parameter as numbers that the model computes with; one that is not quantised unchanged."""
    if not is_quantized(weight):
        return weight.detach()
    functional: Any = import_module("bitsandbytes.functional")
    return functional.dequantize_4bit(weight.data, cast(Any, weight).quant_state)


def shape_of(weight: Tensor) -> torch.Size:
    """Return the shape of a parameter before it was quantised."""
    return cast(Any, weight).quant_state.shape if is_quantized(weight) else weight.shape

"""Low-rank adapters (LoRA, arXiv 2106.09685): a model whose weights stay as they are, and small ones beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_loop.config import ModelConfig
from agent_loop.errors import ConfigError

ADAPTER_CONFIG = "adapter_config.json"
BASE = ".base_layer."


def add_adapters(model: PreTrainedModel, *, config: ModelConfig, seed: int) -> None:
    """Puts new adapters into the model, which change nothing yet, and freezes all else.

    Raises:
        ConfigError: The model has no such modules, or `peft` is missing.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise _needs_peft() from error
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=cast(Any, config.lora_alpha),
        target_modules=config.target_modules,
        task_type="CAUSAL_LM",
    )
    with cast(Any, torch).random.fork_rng(devices=[]):
        cast(Any, torch).manual_seed(seed)
        try:
            cast(Any, model).add_adapter(settings)
        except ValueError as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"model.target_modules is {config.target_modules!r}: {reason}") from error


def load_adapters(model: PreTrainedModel, *, config: ModelConfig, folder: Path) -> None:
    """Puts the adapters that `save_pretrained` wrote into the model, to be trained on.

    Raises:
        ConfigError: They are of another rank, or `peft` is missing.
    """
    try:
        from peft import PeftConfig
    except ImportError as error:
        raise _needs_peft() from error
    rank = cast(Any, PeftConfig).from_pretrained(str(folder)).r
    if rank != config.lora_rank:
        raise ConfigError(
            f"model.lora_rank is {config.lora_rank}, but the adapters in {folder} have {rank}; set "
            f"model.lora_rank={rank}"
        )
    cast(Any, model).load_adapter(str(folder), is_trainable=True)


def has_adapters(model: PreTrainedModel) -> bool:
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def is_adapter_folder(path: str | Path) -> bool:
    return (Path(path) / ADAPTER_CONFIG).is_file()


@torch.no_grad()
def merged_parameters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """All parameters under the names that they have without adapters, tied ones once, what adapters add included.

    Those without an adapter share the model's memory.
    """
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        owner, is_adapted, own_name = name.partition(BASE)
        if not is_adapted:
            yield name, parameter.detach()
            continue
        merged = parameter.detach()
        if own_name == "weight":
            layer: Any = model.get_submodule(owner)
            delta = sum(layer.get_delta_weight(adapter).float() for adapter in layer.active_adapters)
            merged = (merged.float() + delta).to(parameter.dtype)
        yield f"{owner}.{own_name}", merged


def _needs_peft() -> ConfigError:
    return ConfigError('model.lora_rank needs: pip install "agent-loop[lora]"')

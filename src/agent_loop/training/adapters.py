"""Low-rank adapters (LoRA, arXiv 2106.09685)."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_loop.config import ModelConfig
from agent_loop.errors import ConfigError
from agent_loop.servers.embedded.file_names import to_file_weights
from agent_loop.training.master_weights import whole
from agent_loop.training.quantized_base import dequantized

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER = ".lora_"
BASE = ".base_layer."
"""Part of the name of a weight below an adapter. Names of the adapters' own weights contain `ADAPTER`."""


def add_adapters(model: PreTrainedModel, *, config: ModelConfig, seed: int) -> None:
    """Add new adapters to the model and freeze all other weights. New adapters do not change the outputs.

    Raises:
        ConfigError: The model has no such modules, shares the weight of one with a module without that adapter, or
            `peft` is not installed.
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
    with cast(Any, torch).random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")  # refused below
        cast(Any, torch).manual_seed(seed)
        try:
            cast(Any, model).add_adapter(settings)
        except ValueError as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"model.target_modules is {config.target_modules!r}: {reason}") from error
    _check_not_shared(model, config=config)


def _check_not_shared(model: PreTrainedModel, *, config: ModelConfig) -> None:
    """Raise an error if a weight below an adapter is used without that adapter too: servers have one weight for both.

    A module that is used in several places has its adapter in each of them.
    """
    # Names of the modules that use each weight, by their adapter; 0 stands for none.
    users: dict[int, dict[int, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, is_adapted, _ = name.partition(BASE)
        adapter = id(model.get_submodule(owner)) if is_adapted else 0
        users.setdefault(id(parameter), {})[adapter] = owner if is_adapted else name.removesuffix(".weight")
    for names in users.values():
        if len(names) > 1:
            adapted = next(name for adapter, name in names.items() if adapter)
            others = [name for name in names.values() if name != adapted]
            raise ConfigError(
                f"model.target_modules is {config.target_modules!r}, which puts an adapter on {adapted}, but the model "
                f"uses the weight of {adapted} in {others[0]} too (tied weights), and servers have one weight for "
                f"both; leave {adapted.rpartition('.')[2]!r} out of model.target_modules"
            )


def load_adapters(model: PreTrainedModel, *, config: ModelConfig, folder: Path) -> None:
    """Load adapters that `save_pretrained` wrote into the model, for further training.

    Raises:
        ConfigError: The adapters have another rank, or `peft` is not installed.
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
    conversions = getattr(model, "_weight_conversions", None)
    cast(Any, model).load_adapter(str(folder), is_trainable=True)
    cast(Any, model)._weight_conversions = conversions  # loading replaced those of the model's files


@contextmanager
def without_adapters(model: PreTrainedModel) -> Generator[None]:
    """Let the model compute without its adapters, which stay trainable. Nothing changes for a model without any."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    for layer in layers:  # not `enable_adapters`, which changes `requires_grad` too
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merged_adapters(model: PreTrainedModel, *, folder: Path) -> PreTrainedModel:
    """Return the model with adapters that `save_pretrained` wrote, merged into its weights.

    Raises:
        ConfigError: `peft` is not installed.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise _needs_peft() from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads an attribute by its former name
        return cast(Any, PeftModel).from_pretrained(model, str(folder)).merge_and_unload()


def is_adapter_folder(path: str | Path) -> bool:
    return (Path(path) / ADAPTER_CONFIG).is_file()


def merged_parameters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters for servers, with adapters merged, by the names of the model's files; tied ones once.

    Parameters without an adapter share the model's memory, unless the files have them in several parts. If the model is
    sharded, all ranks must call this, and the parameters are gathered.
    """
    return to_file_weights(model, _merged(model))


def persistent_buffers(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of the model's state dict, by the names of its files. They share the model's memory."""
    return to_file_weights(model, own_buffers(model))


def own_buffers(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of the model's state dict, by its own names. They share the model's memory."""
    persistent = model.state_dict().keys()
    return ((name, buffer.detach()) for name, buffer in model.named_buffers() if name in persistent)


def _merged(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters, with adapters merged, by the names that they have without adapters."""
    for name, parameter in model.named_parameters():
        if ADAPTER in name:
            continue
        owner, is_adapted, own_name = name.partition(BASE)
        if not is_adapted:
            yield name, whole(dequantized(parameter))
            continue
        merged = whole(dequantized(parameter))
        if own_name == "weight":
            layer: Any = model.get_submodule(owner)
            with torch.no_grad():
                delta = sum(
                    whole(layer.get_delta_weight(adapter)).float() for adapter in layer.active_adapters
                )
                merged = (merged.float() + delta).to(merged.dtype)
        yield f"{owner}.{own_name}", merged


def _needs_peft() -> ConfigError:
    return ConfigError('model.lora_rank needs: pip install "agent-loop[lora]"')

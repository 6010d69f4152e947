"""Low-rank adapters (LoRA, arXiv 2106.09685), and the weights of a model with adapters for servers."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_loop.config import ModelConfig
from agent_loop.errors import ConfigError
from agent_loop.servers.embedded.weights import has_own_names, to_file_weights
from agent_loop.training.master_weights import dequantized, is_quantized, shape_of, whole
from agent_loop.training.process_group import ProcessGroup
from agent_loop.weights.adapted import AdaptedWeights, Factors

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER = ".lora_"
BASE = ".base_layer."
"""Part of the name of a weight below an adapter. Names of the adapters' own weights contain `ADAPTER`."""


def add_adapters(model: PreTrainedModel, *, config: ModelConfig, seed: int) -> None:
    """Add new adapters to the model and freeze all other weights. New adapters do not change the outputs."""
    settings = _peft().LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
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
    """Load adapters that `save_pretrained` wrote into the model, for further training."""
    rank = _peft().PeftConfig.from_pretrained(str(folder)).r
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
    """Return the model with adapters that `save_pretrained` wrote, merged into its weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads an attribute by its former name
        return _peft().PeftModel.from_pretrained(model, str(folder)).merge_and_unload()


def is_adapter_folder(path: str | Path) -> bool:
    return (Path(path) / ADAPTER_CONFIG).is_file()


def merged_parameters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters for servers, with adapters merged, by the names of the model's files; tied ones once.

    Parameters without an adapter share the model's memory, unless the files have them in several parts. If the model is
    sharded, all ranks must call this, and the parameters are gathered.
    """
    return to_file_weights(model, _merged(model))


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


def _peft() -> Any:
    try:
        return import_module("peft")
    except ImportError as error:
        raise ConfigError('model.lora_rank needs: pip install "agent-loop[lora]"') from error


def are_low_rank(model: PreTrainedModel) -> bool:
    """Return whether only adapters are trained, and each adds a product of two matrices to a weight of the files."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not names or not all(ADAPTER in name for name in names):
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    return all(is_low_rank(layer) for layer in layers) and _file_names(model) is not None


class AdaptedModel:
    """Source of the base weights and factors that servers receive."""

    def __init__(self, model: PreTrainedModel, *, dtype: torch.dtype, process_group: ProcessGroup) -> None:
        """Refer to a model with low-rank adapters, whose other weights do not change.

        Servers receive weights in `dtype`. The base shares the model's memory. It is in CPU memory if there are several
        ranks, if the model's files have other weights, or if weights of few bits were dequantised.
        """
        self._model = model
        self._dtype = dtype
        self._process_group = process_group
        self._file_names = _file_names(model) or {}
        self._base: dict[str, Tensor] | None = None
        self._base_id = secrets.token_hex(8)

    @torch.no_grad()
    def weights(self) -> AdaptedWeights:
        """Return the base and the current factors. All ranks must call this; only rank 0 gets factors."""
        if self._base is None:
            self._base = self._make_base()
        factors: dict[str, Factors] = {}
        for name, layer in cast(Any, self._model).named_modules():
            if hasattr(layer, "base_layer") and (found := _factors_of(layer)) is not None:
                factors[self._file_names[f"{name}.weight"]] = found
        is_first = self._process_group.rank == 0
        return AdaptedWeights(self._base, base_id=self._base_id, factors=factors if is_first else {})

    def _make_base(self) -> dict[str, Tensor]:
        """Return the base by the names of the files and in the dtype for servers. Buffers keep their dtype."""
        is_sharded = self._process_group.mesh is not None
        is_copied = has_own_names(self._model) or any(map(is_quantized, self._model.parameters()))
        buffers = {name for name, _ in self._model.named_buffers()}

        def for_servers(name: str, weight: Tensor) -> Tensor:
            device = "cpu" if is_copied else weight.device
            return dequantized(whole(weight)).to(device, weight.dtype if name in buffers else self._dtype)

        weights = ((name, for_servers(name, weight)) for name, weight in self._below_adapters())
        base: dict[str, Tensor] = {}
        for name, weight in to_file_weights(self._model, weights):
            if self._process_group.rank == 0:  # gathered weights are freed after a forward
                base[name] = weight.to("cpu", copy=True) if is_sharded else weight
        return base

    def _below_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights that are not adapters, by the names that they have without adapters."""
        for name, parameter in self._model.named_parameters():
            if ADAPTER not in name:
                yield name.replace(BASE, "."), parameter  # as it is: detached, it may lose its quantisation
        yield from own_buffers(self._model)


def _file_names(model: PreTrainedModel) -> dict[str, str] | None:
    """Return the names in the model's files of the weights with an adapter, or None if a file has parts of one."""
    names: dict[str, str] = {}
    for name, layer in cast(Any, model).named_modules():
        if not hasattr(layer, "base_layer"):
            continue
        weight = torch.empty(shape_of(layer.base_layer.weight), device="meta")
        in_files = list(to_file_weights(model, [(f"{name}.weight", weight)]))
        if len(in_files) != 1 or in_files[0][1].shape != weight.shape:
            return None
        names[f"{name}.weight"] = in_files[0][0]
    return names


def is_low_rank(layer: Any) -> bool:
    """Return whether a layer of `peft` adds a product of two matrices to a weight, and nothing else."""
    from peft.tuners import lora

    plain = (lora.Linear, lora.Embedding, getattr(lora, "Linear4bit", None))
    is_plain = type(layer) in plain
    return is_plain and not layer.lora_variant and not any(layer.lora_bias.values())


def _factors_of(layer: Any) -> Factors | None:
    """Return the factors of all active adapters, concatenated: the product is the sum of their products."""
    lefts: list[Tensor] = []
    rights: list[Tensor] = []
    for adapter in layer.active_adapters:
        if adapter in layer.lora_embedding_A:
            down, up, is_transposed = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter], True
        else:
            down, up = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
            is_transposed = layer.fan_in_fan_out
        down_RI, up_OR = whole(down).float(), whole(up).float() * layer.scaling[adapter]
        lefts.append(down_RI.T if is_transposed else up_OR)
        rights.append(up_OR.T if is_transposed else down_RI)
    return Factors(torch.cat(lefts, dim=1).contiguous(), torch.cat(rights).contiguous()) if lefts else None

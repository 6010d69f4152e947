"""The float32 weights that the optimiser updates, and base weights of adapters in 4 bits (QLoRA, arXiv 2305.14314).

The model computes in its dtype, on its device and with its shards, and with the dequantised base weights, which servers
get too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agent_loop.errors import ConfigError
from agent_loop.training.process_group import ProcessGroup


def quantized_loading(*, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the options of `from_pretrained` that load linear layers in 4 bits. The head and embeddings stay as
    they are.
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


@dataclass(frozen=True, slots=True)
class MasterWeights:
    """Trained weights of a model, which collect the gradients of its passes."""

    tensors: Mapping[str, Tensor]
    """Weights by the names of the parameters."""
    copies: Mapping[str, nn.Parameter]
    """Parameters of the model that are copies, in lower precision or on another device."""

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Copy the weights to the model. Call it after each step of the optimiser."""
        for name, copy in self.copies.items():
            copy.copy_(self.tensors[name])


def take_weights(
    model: PreTrainedModel,
    *,
    process_group: ProcessGroup,
    dtype: torch.dtype | None = None,
    on_host: bool = False,
) -> MasterWeights:
    """Make the model compute in `dtype`, keep only this rank's shard of several, and return the weights to train.

    The model must be loaded in float32. Parameters that require no gradient are cast or sharded too. With `on_host`,
    the weights, and so their gradients, are in CPU memory; the model's parameters are copies.
    """
    if process_group.mesh is not None and on_host:
        raise ConfigError(
            "optimizer_on_host is on, but the weights are sharded over several processes; set "
            "optimizer_on_host=false or trainer.num_processes=1"
        )
    if process_group.mesh is not None:
        _shard(model, process_group=process_group, dtype=dtype)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    dtype = dtype or model.dtype
    if process_group.mesh is not None or (dtype == model.dtype and not on_host):
        return MasterWeights(trained, {})
    tensors = {name: parameter.detach() for name, parameter in trained.items()}
    if on_host:
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
    for parameter in model.parameters():
        if not is_quantized(parameter):
            parameter.data = parameter.data.to(dtype)
    for name, parameter in trained.items():
        _move_gradients(parameter, master=tensors[name])
    return MasterWeights(tensors, trained)


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor of a shard, or a tensor that is not sharded unchanged. All ranks must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save_model(
    model: PreTrainedModel, folder: Path, *, weights: MasterWeights, process_group: ProcessGroup
) -> None:
    """Save a model, or its adapters if it has any, in full precision. All ranks must call this; rank 0 writes."""
    masters = {id(copy): weights.tensors[name] for name, copy in weights.copies.items()}
    gathered: dict[int, Tensor] = {}  # tied weights stay tied
    state: dict[str, Tensor] = {}
    has_adapters = hasattr(model, "peft_config")
    for name, value in _named_tensors(model):
        if has_adapters and not value.requires_grad:
            continue  # `peft` would store the weights below an adapter of the head, and not load them
        if id(value) not in gathered:
            full = whole(masters.get(id(value), value).detach())
            gathered[id(value)] = full.cpu() if process_group.rank == 0 else full.new_empty(0)
        state[name] = gathered[id(value)]
    if process_group.rank == 0:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Setting `save_embedding_layers` to `True`")
            cast(Any, model).save_pretrained(str(folder), state_dict=state)


def _shard(model: PreTrainedModel, *, process_group: ProcessGroup, dtype: torch.dtype | None) -> None:
    """Shard a model over the process group. Gradients are summed over the ranks in float32."""
    # The outputs of a model may be views; nothing here writes to them.
    warnings.filterwarnings("ignore", message=".*returned a view tensor", category=UserWarning)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in [*layers, model]:
        fully_shard(module, mesh=process_group.mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # the one reduction that gloo has


def _move_gradients(parameter: nn.Parameter, *, master: Tensor) -> None:
    """Add the gradient of each pass to the master weight, in its precision."""

    def move(parameter: Tensor) -> None:
        gradient = cast(Tensor, parameter.grad).to(master)
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    cast(Any, parameter).register_post_accumulate_grad_hook(move)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by the names of the state dict, tied ones under each of their names."""
    persistent = model.state_dict().keys()
    yield from model.named_parameters(remove_duplicate=False)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in persistent:
            yield name, buffer

"""The weights that an optimiser moves, in float32, whatever the model computes in, and wherever their shards are."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agent_loop.training.process_group import ProcessGroup

Gradients: TypeAlias = tuple[Tensor | None, ...]
"""One for each weight; None where the loss does not depend on it."""


@dataclass(frozen=True, slots=True)
class MasterWeights:
    """What is trained of a model. Gradients of the model's passes arrive here."""

    tensors: Mapping[str, Tensor]
    """By the names of the parameters."""
    copies: Mapping[str, nn.Parameter]
    """Those parameters of the model that are copies in lower precision."""

    def gradients_of(self, loss: Tensor) -> Gradients:
        """Changes nothing. Not for sharded weights."""
        parameters = [self.copies.get(name, weight) for name, weight in self.tensors.items()]
        return torch.autograd.grad(loss, parameters, allow_unused=True)

    def add(self, gradients: Gradients) -> None:
        """As if they had arrived by a backward pass."""
        for weight, gradient in zip(self.tensors.values(), gradients, strict=True):
            if gradient is None:
                continue
            if weight.grad is None:
                weight.grad = gradient.to(weight.dtype, copy=True)  # weights may have been given one tensor
            else:
                weight.grad.add_(gradient.to(weight.dtype))

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """After each step of the optimiser."""
        for name, copy in self.copies.items():
            copy.copy_(self.tensors[name])


def take_weights(
    model: PreTrainedModel, *, process_group: ProcessGroup, dtype: torch.dtype | None = None
) -> MasterWeights:
    """Make the model compute in `dtype`, and keep only this rank's shard if there are several ranks.

    The model is to be loaded in float32. Parameters that want no gradient are cast, or sharded, with the others.
    """
    if process_group.mesh is not None:
        _shard(model, process_group=process_group, dtype=dtype)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if process_group.mesh is not None or dtype in (None, model.dtype):
        return MasterWeights(trained, {})
    tensors = {name: parameter.detach() for name, parameter in trained.items()}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for name, parameter in trained.items():
        _hand_gradients_over(parameter, master=tensors[name])
    return MasterWeights(tensors, trained)


def whole(tensor: Tensor) -> Tensor:
    """The tensor that this one is a shard of, which all processes ask for; a tensor that is no shard as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save_model(
    model: PreTrainedModel, folder: Path, *, weights: MasterWeights, process_group: ProcessGroup
) -> None:
    """Writes what `transformers` loads, in full precision. All processes call it; rank 0 writes."""
    masters = {id(copy): weights.tensors[name] for name, copy in weights.copies.items()}
    gathered: dict[int, Tensor] = {}  # tied weights stay tied
    state: dict[str, Tensor] = {}
    for name, value in _named_tensors(model):
        if id(value) not in gathered:
            full = whole(masters.get(id(value), value).detach())
            gathered[id(value)] = full.cpu() if process_group.rank == 0 else full.new_empty(0)
        state[name] = gathered[id(value)]
    if process_group.rank == 0:
        cast(Any, model).save_pretrained(str(folder), state_dict=state)


def _shard(model: PreTrainedModel, *, process_group: ProcessGroup, dtype: torch.dtype | None) -> None:
    """Gradients are summed over the processes, in float32."""
    # What a model returns may be a view; nothing here writes into it.
    warnings.filterwarnings("ignore", message=".*returned a view tensor", category=UserWarning)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in [*layers, model]:
        fully_shard(module, mesh=process_group.mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # the one reduction that gloo has


def _hand_gradients_over(parameter: nn.Parameter, *, master: Tensor) -> None:
    """Each pass's gradient is added in the master's precision."""

    def hand_over(parameter: Tensor) -> None:
        gradient = cast(Tensor, parameter.grad).to(master.dtype)
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    cast(Any, parameter).register_post_accumulate_grad_hook(hand_over)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by the names of the state dict, tied ones under each of their names."""
    persistent = model.state_dict().keys()
    yield from model.named_parameters(remove_duplicate=False)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in persistent:
            yield name, buffer

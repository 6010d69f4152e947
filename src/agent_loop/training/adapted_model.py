"""Weights of a model with low-rank adapters: the base, which does not change, and the factors of the adapters."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_loop.servers.embedded.file_names import has_own_names, to_file_weights
from agent_loop.training.adapters import ADAPTER, BASE, own_buffers
from agent_loop.training.master_weights import whole
from agent_loop.training.process_group import ProcessGroup
from agent_loop.training.quantized_base import dequantized, is_quantized, shape_of
from agent_loop.weights import AdaptedWeights, Factors


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
        """Refer to a model with low-rank adapters.

        Args:
            model: The model.
            dtype: Dtype of the weights that servers receive.
            process_group: Process group over which the model is sharded. With several ranks, rank 0 copies the base to
                CPU memory at the first call of `weights`. With one rank, the base shares the model's memory, and gets a
                new id if it has been written to. It is in CPU memory too if the model's files have other weights, or
                weights of few bits were dequantised.
        """
        self._model = model
        self._dtype = dtype
        self._process_group = process_group
        self._file_names = _file_names(model) or {}
        self._is_copied = has_own_names(model) or any(map(is_quantized, model.parameters()))
        self._base: dict[str, Tensor] = {}
        self._base_id = ""
        self._places: list[tuple[int, int]] = []

    @torch.no_grad()
    def weights(self) -> AdaptedWeights:
        """Return the base and the current factors. All ranks must call this; only rank 0 gets factors."""
        if self._process_group.mesh is None:
            self._update_base_id()
        elif not self._base_id:
            self._gather_base()
        factors: dict[str, Factors] = {}
        for name, layer in cast(Any, self._model).named_modules():
            if hasattr(layer, "base_layer") and (found := _factors_of(layer)) is not None:
                factors[self._file_names[f"{name}.weight"]] = found
        return AdaptedWeights(
            self._base, base_id=self._base_id, factors=factors if self._process_group.rank == 0 else {}
        )

    def _update_base_id(self) -> None:
        tensors = list(self._below_adapters())
        places = [(tensor.data_ptr(), cast(Any, tensor)._version) for _, tensor in tensors]
        if places != self._places:
            self._places, self._base_id = places, secrets.token_hex(8)
            self._base = dict(self._for_servers(tensors, device="cpu" if self._is_copied else None))

    def _gather_base(self) -> None:
        gathered = ((name, whole(tensor)) for name, tensor in self._below_adapters())
        for name, tensor in self._for_servers(gathered):
            if self._process_group.rank == 0:  # copied, because gathered weights are freed after a forward
                self._base[name] = tensor.to("cpu", copy=True)
        self._base_id = secrets.token_hex(8)

    def _for_servers(
        self, weights: Iterable[tuple[str, Tensor]], *, device: str | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield weights by the names of the files and in the dtype for servers. Buffers keep their dtype."""
        buffers = {name for name, _ in self._model.named_buffers()}
        cast_weights = (
            (
                name,
                dequantized(tensor).to(
                    device or tensor.device, tensor.dtype if name in buffers else self._dtype
                ),
            )
            for name, tensor in weights
        )
        return to_file_weights(self._model, cast_weights)

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

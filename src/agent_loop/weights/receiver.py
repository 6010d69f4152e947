"""Receiver of weights, in the engine's process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Self

import torch
from torch import Tensor

from agent_loop.weights.adapted import AdaptedWeights
from agent_loop.weights.broadcast import receive_broadcast
from agent_loop.weights.cuda_ipc import receive_cuda_ipc
from agent_loop.weights.disk import receive_disk
from agent_loop.weights.handle import TensorSpec, WeightHandle
from agent_loop.weights.shared_memory import receive_shared_memory
from agent_loop.weights.tensors import verify


class WeightReceiver:
    """Receives offers in an engine's process. It keeps the base weights of adapters between offers."""

    def __init__(self, rank: int = 0, *, merges_on: torch.device | str = "cpu") -> None:
        """Create a receiver.

        Args:
            rank: Rank of this receiver among the sender's receivers.
            merges_on: Device on which adapters are merged into their base. Other weights stay on the transport's
                device.
        """
        self._rank = rank
        self._merges_on = torch.device(merges_on)
        self._base: dict[str, Tensor] = {}
        self._base_id = ""

    def receive(self, handle: WeightHandle | str | bytes) -> Iterable[tuple[str, Tensor]]:
        """Return all tensors of an offer in order, after all of them have been verified.

        Copy the tensors before you reply to the sender, because they are valid only until the offer ends. Afterwards
        they can still be read, but may contain the weights of a later offer. Do not write to them: those of `cuda_ipc`
        are the sender's memory, and those of a base are needed again. Weights with adapters are merged when they are
        iterated over, so that the process need not hold all merged weights at once.
        """
        if not isinstance(handle, WeightHandle):
            handle = WeightHandle.from_json(handle)
        if handle.base is None:
            return self._read(handle)
        if self._base_id != handle.base_id:
            self._base, self._base_id = {}, ""  # drop the old base first: there may not be memory for two
            self._base, self._base_id = dict(self._read(handle.base)), handle.base_id
        factors = {name: tensor.to(self._merges_on, copy=True) for name, tensor in self._read(handle)}
        return AdaptedWeights.from_tensors(factors, base=self._base, base_id=self._base_id)

    def close(self) -> None:
        """Drop the base weights. Can be called again."""
        self._base, self._base_id = {}, ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, handle: WeightHandle) -> list[tuple[str, Tensor]]:
        found: list[tuple[str, Tensor]] = []
        for spec, tensor in self._open(handle):
            verify(spec, tensor)
            found.append((spec.name, tensor))
        return found

    def _open(self, handle: WeightHandle) -> Iterator[tuple[TensorSpec, Tensor]]:
        match handle.transport:
            case "shared_memory":
                return receive_shared_memory(handle)
            case "cuda_ipc":
                return receive_cuda_ipc(handle, rank=self._rank)
            case "broadcast":
                return receive_broadcast(handle, rank=self._rank)
            case "disk":
                return receive_disk(handle)

"""Receiver of weights, in the engine's process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType

import torch
from torch import Tensor

from agent_loop.errors import WeightsError
from agent_loop.weights.adapted import AdaptedWeights
from agent_loop.weights.broadcast import BroadcastReceiver
from agent_loop.weights.checksum import checksum
from agent_loop.weights.cuda_ipc import receive_cuda_ipc
from agent_loop.weights.disk import receive_disk
from agent_loop.weights.handle import TensorSpec, WeightHandle
from agent_loop.weights.shared_memory import receive_shared_memory


class WeightReceiver:
    """Receives offers in an engine's process. It keeps connections and the base weights of adapters between offers."""

    def __init__(self, rank: int = 0, *, merges_on: torch.device | str = "cpu") -> None:
        """Create a receiver without connections.

        Args:
            rank: Rank of this receiver among the sender's receivers.
            merges_on: Device on which adapters are merged into their base. Other weights stay on the transport's
                device.
        """
        self._rank = rank
        self._merges_on = torch.device(merges_on)
        self._broadcast = BroadcastReceiver(rank)
        self._base: dict[str, Tensor] = {}
        self._base_id = ""

    def receive(self, handle: WeightHandle | str | bytes) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors of an offer in order, each verified before it is yielded, with adapters merged.

        Copy the tensors before you reply to the sender, because they are valid only until the offer ends. Afterwards
        they can still be read, but may contain the weights of a later offer. Writing to them does not affect the
        sender, except for `cuda_ipc`, whose tensors are the sender's memory: only read them, and drop them before the
        offer ends.

        Raises:
            WeightsError: The handle is invalid, the offer cannot be reached, or a tensor is damaged. The tensors before
                the damaged one have been yielded already; `receive_all` avoids that.
        """
        if not isinstance(handle, WeightHandle):
            handle = WeightHandle.from_json(handle)
        if handle.base is None:
            yield from self._verified(handle)
        else:
            yield from _MergedWeights(self._adapted(handle, handle.base)).items()

    def receive_all(self, handle: WeightHandle | str | bytes) -> Mapping[str, Tensor]:
        """Return all tensors of an offer after all of them have been verified. See `receive`.

        Adapters are merged when a weight is accessed, so that the process need not hold all merged weights at once.
        """
        if not isinstance(handle, WeightHandle):
            handle = WeightHandle.from_json(handle)
        if handle.base is None:
            return dict(self._verified(handle))
        return _MergedWeights(self._adapted(handle, handle.base))

    def close(self) -> None:
        """Close the connections and drop the base weights. Can be called again."""
        self._broadcast.close()
        self._base, self._base_id = {}, ""

    def __enter__(self) -> WeightReceiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _adapted(self, handle: WeightHandle, base: WeightHandle) -> AdaptedWeights:
        if self._base_id != handle.base_id:
            self._base, self._base_id = {}, ""  # drop the old base first: there may not be memory for two
            self._base, self._base_id = dict(self._verified(base)), handle.base_id
        factors = {name: tensor.to(self._merges_on, copy=True) for name, tensor in self._verified(handle)}
        return AdaptedWeights.from_tensors(factors, base=self._base, base_id=self._base_id)

    def _verified(self, handle: WeightHandle) -> Iterator[tuple[str, Tensor]]:
        for spec, tensor in self._open(handle):
            if handle.has_checksums:
                _verify(spec, tensor)
            yield spec.name, tensor

    def _open(self, handle: WeightHandle) -> Iterator[tuple[TensorSpec, Tensor]]:
        match handle.transport:
            case "shared_memory":
                return receive_shared_memory(handle)
            case "cuda_ipc":
                return receive_cuda_ipc(handle, rank=self._rank)
            case "broadcast":
                return self._broadcast.receive(handle)
            case "disk":
                return receive_disk(handle)


class _MergedWeights(Mapping[str, Tensor]):
    """Merged weights, each computed when it is accessed. They can be written to without changing the base."""

    def __init__(self, weights: AdaptedWeights) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._weights.merged(name)
        return tensor.clone() if tensor is self._weights.base[name] else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights.base)

    def __len__(self) -> int:
        return len(self._weights)


def _verify(spec: TensorSpec, tensor: Tensor) -> None:
    found = checksum(tensor.reshape(-1).view(torch.uint8))
    if found != spec.checksum:
        raise WeightsError(
            f"weight {spec.name!r} was damaged in transfer: its checksum is {found}, but {spec.checksum} was sent; "
            "publish again"
        )

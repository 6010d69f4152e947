"""The engine's side."""

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
    """Takes offers in an engine's process. Long-lived: it keeps connections, and the base below adapters, from one
    offer to the next."""

    def __init__(self, rank: int = 0, *, merges_on: torch.device | str = "cpu") -> None:
        """Args:
        rank: Which of the sender's receivers this is.
        merges_on: Where adapters are merged into their base. Other weights come as the transport brings them.
        """
        self._rank = rank
        self._merges_on = torch.device(merges_on)
        self._broadcast = BroadcastReceiver(rank)
        self._base: dict[str, Tensor] = {}
        self._base_id = ""

    def receive(self, handle: WeightHandle | str | bytes) -> Iterator[tuple[str, Tensor]]:
        """Yields all tensors of an offer in order, each verified before it is handed out; those with adapters merged.

        They hold what was sent until the offer ends: do not answer the sender before they are copied to where they
        belong. Afterwards they stay readable, but may show the weights of a later offer. They may be written to, which
        nobody else sees; only those of `cuda_ipc` are the sender's own memory, to be read and let go of in time.

        Raises:
            WeightsError: The handle is garbage, the offer is out of reach, or a tensor is damaged. The tensors before
                it have been handed out already; see `receive_all`.
        """
        if not isinstance(handle, WeightHandle):
            handle = WeightHandle.from_json(handle)
        if handle.base is None:
            yield from self._verified(handle)
        else:
            yield from _Merged(self._adapted(handle, handle.base)).items()

    def receive_all(self, handle: WeightHandle | str | bytes) -> Mapping[str, Tensor]:
        """All tensors of an offer, handed out only if every one of them is as it was sent. See `receive`.

        Adapters are merged as weights are asked for, so that an engine's process need not hold all of them at once.
        """
        if not isinstance(handle, WeightHandle):
            handle = WeightHandle.from_json(handle)
        if handle.base is None:
            return dict(self._verified(handle))
        return _Merged(self._adapted(handle, handle.base))

    def close(self) -> None:
        """Gives up connections, and the base. Can be called again."""
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
            self._base, self._base_id = {}, ""  # first: two may be more than there is memory for
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


class _Merged(Mapping[str, Tensor]):
    """Weights as an engine loads them, each made when it is asked for. Whoever writes to them spares the base."""

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
            f"weight {spec.name!r} arrived damaged: its checksum is {found}, but {spec.checksum} was sent; publish "
            "again"
        )

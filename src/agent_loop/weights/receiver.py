"""The engine's side."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import torch
from torch import Tensor

from agent_loop.errors import WeightsError
from agent_loop.weights.broadcast import BroadcastReceiver
from agent_loop.weights.checksum import checksum
from agent_loop.weights.cuda_ipc import receive_cuda_ipc
from agent_loop.weights.disk import receive_disk
from agent_loop.weights.handle import TensorSpec, WeightHandle
from agent_loop.weights.shared_memory import receive_shared_memory


class WeightReceiver:
    """Takes offers in an engine's process. Long-lived: it keeps connections from one offer to the next."""

    def __init__(self, rank: int = 0) -> None:
        """Args: rank: Which of the sender's receivers this is."""
        self._rank = rank
        self._broadcast = BroadcastReceiver(rank)

    def receive(self, handle: WeightHandle | str | bytes) -> Iterator[tuple[str, Tensor]]:
        """Yields all tensors of an offer in order, each verified before it is handed out.

        They hold what was sent until the offer ends: do not answer the sender before they are copied to where they
        belong. Afterwards they stay readable, but may show the weights of a later offer. They may be written to, which
        nobody else sees; only those of `cuda_ipc` are the sender's own memory, to be read and let go of in time.

        Raises:
            WeightsError: The handle is garbage, the offer is out of reach, or a tensor is damaged. The tensors before
                it have been handed out already; see `receive_all`.
        """
        if not isinstance(handle, WeightHandle):
            handle = WeightHandle.from_json(handle)
        for spec, tensor in self._open(handle):
            if handle.has_checksums:
                _verify(spec, tensor)
            yield spec.name, tensor

    def receive_all(self, handle: WeightHandle | str | bytes) -> dict[str, Tensor]:
        """All tensors of an offer, handed out only if every one of them is as it was sent. See `receive`."""
        return dict(self.receive(handle))

    def close(self) -> None:
        """Gives up connections. Can be called again."""
        self._broadcast.close()

    def __enter__(self) -> WeightReceiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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


def _verify(spec: TensorSpec, tensor: Tensor) -> None:
    found = checksum(tensor.reshape(-1).view(torch.uint8))
    if found != spec.checksum:
        raise WeightsError(
            f"weight {spec.name!r} arrived damaged: its checksum is {found}, but {spec.checksum} was sent; publish "
            "again"
        )

"""Sender of weights, in the trainer's process."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from msgspec.structs import replace
from torch import Tensor

from agent_loop.config import WeightTransfer
from agent_loop.errors import ConfigError, WeightsError
from agent_loop.weights.adapted import AdaptedWeights
from agent_loop.weights.broadcast import BroadcastSender
from agent_loop.weights.cuda_ipc import CudaIpcSender
from agent_loop.weights.disk import DiskSender
from agent_loop.weights.handle import Transport, WeightHandle
from agent_loop.weights.shared_memory import SharedMemorySender

DEFAULT_TIMEOUT_S = 300.0


def choose_transport(configured: WeightTransfer, *, weights_on_gpu: bool, same_host: bool) -> Transport:
    """Return the transport for a value of `rollout.weight_transfer`.

    Args:
        configured: `auto`, or a transport.
        weights_on_gpu: Whether the trainer's weights are on a GPU.
        same_host: Whether this run started the engine on this machine, so that it shares memory and devices with the
            trainer. False for a server that was already running.
    """
    if configured == "auto":
        if not same_host:
            return "disk"
        return "cuda_ipc" if weights_on_gpu else "shared_memory"
    if configured == "cuda_ipc" and not weights_on_gpu:
        raise ConfigError(
            "rollout.weight_transfer is cuda_ipc, but the weights are not on a GPU; set shared_memory or auto"
        )
    if configured in ("cuda_ipc", "shared_memory") and not same_host:
        raise ConfigError(
            f"rollout.weight_transfer is {configured}, but the server was not started by this run and may be on "
            "another machine; set disk, broadcast or auto"
        )
    return configured


class WeightSender:
    """Offers weights to receivers in other processes. Long-lived: later offers reuse memory and connections.

    For `AdaptedWeights`, `shared_memory` and `disk` offer the base once, until the sender is closed or the base
    changes. Each further offer contains only the factors. The other transports send all merged weights each time,
    because receivers may have been replaced. `disk` with `like` does so too, because its offers are checkpoints.

    Only one offer can be open at a time. Any thread may open it.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        num_receivers: int = 1,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        host: str = "127.0.0.1",
        folder: Path | None = None,
        like: Path | None = None,
    ) -> None:
        """Create a sender. Memory, ports and folders are allocated by the first offer.

        Args:
            transport: Transport of the tensors. `choose_transport` chooses one.
            num_receivers: Ranks 0 to num_receivers - 1 receive each offer. Used by `broadcast` and `cuda_ipc` only.
            timeout_s: `broadcast` only: seconds to wait for a receiver to join or to receive a bucket.
            host: `broadcast` only: address at which the receivers reach this machine.
            folder: `disk` only: where to write; a new temporary folder if None.
            like: `disk` only: model folder whose other files (configuration, tokenizer) are copied, so that each offer
                is a checkpoint that engines can load directly. Its path is `handle.source["folder"]`.
        """

        def make_sender() -> SharedMemorySender | CudaIpcSender | BroadcastSender | DiskSender:
            match transport:
                case "shared_memory":
                    return SharedMemorySender()
                case "cuda_ipc":
                    return CudaIpcSender(num_receivers=num_receivers)
                case "broadcast":
                    return BroadcastSender(num_receivers=num_receivers, host=host, timeout_s=timeout_s)
                case "disk":
                    return DiskSender(folder=folder, like=like)

        self.transport: Transport = transport
        is_open_to_all = transport in ("shared_memory", "disk")
        self.sharing_key: Hashable | None = (transport, folder, like) if is_open_to_all else None
        """Equal for senders whose offers are interchangeable. None if the transport depends on its receivers."""
        self.is_closed = False
        self._make_sender = make_sender
        self._sender = make_sender()
        self._keeps_base = is_open_to_all and like is None
        self._base: tuple[str, WeightHandle] | None = None
        """Id and handle of the base weights of adapters, whose offer stays open across updates."""
        self._base_offer = ExitStack()

    @contextmanager
    def offer(self, weights: Iterable[tuple[str, Tensor]], *, weight_version: int) -> Generator[WeightHandle]:
        """Make weights available to receivers while the context is open.

        Args:
            weights: Names and plain dense tensors, on one device. They are copied when the context is entered and may
                change afterwards. `broadcast` reads them while the context is open.
            weight_version: Version that the handle states.
        """
        if self.is_closed:
            raise WeightsError("this sender is closed; create a new one")
        if not isinstance(weights, AdaptedWeights) or not self._keeps_base:
            with self._sender.offer(weights, weight_version=weight_version) as handle:
                yield handle
            return
        base = self._offer_base(weights, weight_version=weight_version)
        with self._sender.offer(weights.to_tensors(), weight_version=weight_version) as handle:
            yield replace(handle, base=base, base_id=weights.base_id)

    def close(self) -> None:
        """Release the memory, connections and files of the offers. Can be called again."""
        self.is_closed = True
        self._sender.close()
        self._close_base()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _offer_base(self, weights: AdaptedWeights, *, weight_version: int) -> WeightHandle:
        if self._base is None or self._base[0] != weights.base_id:
            self._close_base()
            sender = self._make_sender()
            self._base_offer.callback(sender.close)
            offer = sender.offer(weights.base.items(), weight_version=weight_version)
            self._base = weights.base_id, self._base_offer.enter_context(offer)
        return self._base[1]

    def _close_base(self) -> None:
        self._base = None
        self._base_offer.close()

"""Sender of weights, in the trainer's process."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

from torch import Tensor

from agent_loop.errors import WeightsError
from agent_loop.weights.adapted import AdaptedWeights
from agent_loop.weights.broadcast import BroadcastSender
from agent_loop.weights.cuda_ipc import CudaIpcSender
from agent_loop.weights.disk import DiskSender
from agent_loop.weights.handle import Transport, WeightHandle
from agent_loop.weights.shared_memory import SharedMemorySender

DEFAULT_TIMEOUT_S = 300.0


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
        has_checksums: bool = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        host: str = "127.0.0.1",
        folder: Path | None = None,
        like: Path | None = None,
        keep: bool = False,
    ) -> None:
        """Create a sender. Memory, ports and folders are allocated by the first offer.

        Args:
            transport: Transport of the tensors. `choose_transport` chooses one.
            num_receivers: Ranks 0 to num_receivers - 1 receive each offer. Used by `broadcast` and `cuda_ipc` only.
            has_checksums: Whether to send checksums, so that receivers can verify each tensor.
            timeout_s: `broadcast` only: seconds to wait for a receiver to join or to receive a bucket.
            host: `broadcast` only: address at which the receivers reach this machine.
            folder: `disk` only: where to write; a new temporary folder if None.
            like: `disk` only: model folder whose other files (configuration, tokenizer) are copied, so that each offer
                is a checkpoint that engines can load directly. Its path is `handle.source["folder"]`.
            keep: `disk` only: whether to keep the files after the offer.
        """
        self._transport: Transport = transport
        self._is_closed = False
        self._sharing_key: Hashable | None = None
        if transport in ("shared_memory", "disk"):
            self._sharing_key = (transport, has_checksums, folder, like, keep)

        def make_transport_sender() -> _TransportSender:
            match transport:
                case "shared_memory":
                    return SharedMemorySender(has_checksums=has_checksums)
                case "cuda_ipc":
                    return CudaIpcSender(has_checksums=has_checksums, num_receivers=num_receivers)
                case "broadcast":
                    return BroadcastSender(
                        has_checksums=has_checksums,
                        num_receivers=num_receivers,
                        host=host,
                        timeout_s=timeout_s,
                    )
                case "disk":
                    return DiskSender(has_checksums=has_checksums, folder=folder, like=like, keep=keep)

        self._transport_sender = make_transport_sender()
        self._base = _BaseOffer(make_transport_sender)
        self._keeps_base = self._sharing_key is not None and like is None

    @property
    def transport(self) -> Transport:
        return self._transport

    @property
    def sharing_key(self) -> Hashable | None:
        """Equal for senders whose offers are interchangeable. None if the transport depends on its receivers."""
        return self._sharing_key

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @contextmanager
    def offer(self, weights: Iterable[tuple[str, Tensor]], *, weight_version: int) -> Generator[WeightHandle]:
        """Make weights available to receivers while the context is open.

        Args:
            weights: Names and plain dense tensors, on one device. They are copied when the context is entered and may
                change afterwards. `broadcast` reads them while the context is open.
            weight_version: Version that the handle states.

        Raises:
            WeightsError: A tensor cannot be sent, or there is no memory or disk space for it. On exit: a receiver of a
                broadcast did not receive the weights in time.
        """
        if self._is_closed:
            raise WeightsError("this sender is closed; create a new one")
        if not isinstance(weights, AdaptedWeights) or not self._keeps_base:
            with self._transport_sender.offer(weights, weight_version=weight_version) as handle:
                yield handle
            return
        base = self._base.open(weights, weight_version=weight_version)
        with self._transport_sender.offer(weights.to_tensors(), weight_version=weight_version) as handle:
            yield replace(handle, base=base, base_id=weights.base_id)

    def close(self) -> None:
        """Release the memory, connections and files of the offers. Can be called again."""
        if not self._is_closed:
            self._is_closed = True
            self._transport_sender.close()
            self._base.close()

    def __enter__(self) -> WeightSender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _BaseOffer:
    """Offer of the base weights of adapters, which stays open across updates."""

    def __init__(self, make_transport_sender: Callable[[], _TransportSender]) -> None:
        self._make_transport_sender = make_transport_sender
        self._open = ExitStack()
        self._base_id = ""
        self._handle: WeightHandle | None = None

    def open(self, weights: AdaptedWeights, *, weight_version: int) -> WeightHandle:
        """Return the handle of the offer of this base. An offer of another base is closed."""
        if self._handle is None or self._base_id != weights.base_id:
            self.close()
            sender = self._make_transport_sender()
            self._open.callback(sender.close)
            offer = sender.offer(weights.base.items(), weight_version=weight_version)
            self._handle, self._base_id = self._open.enter_context(offer), weights.base_id
        return self._handle

    def close(self) -> None:
        self._handle = None
        self._open.close()


class _TransportSender(Protocol):
    """Sender of one transport."""

    def offer(self, weights: Iterable[tuple[str, Tensor]], *, weight_version: int) -> _OfferContext: ...

    def close(self) -> None: ...


class _OfferContext(Protocol):
    def __enter__(self) -> WeightHandle: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None: ...

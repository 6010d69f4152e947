"""The trainer's side."""

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
    """Offers weights to receivers in other processes. Long-lived: what one offer set up is used by the next.

    Of `AdaptedWeights`, `shared_memory` and `disk` offer the base once, until the sender closes or another base comes;
    each further offer has the factors alone. The others push to who is there at the time, so that they send all merged
    weights each time; so does `disk` with `like`, whose offers are checkpoints.

    One offer at a time, from any thread.
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
        """Takes nothing yet: memory, ports and folders come with the first offer.

        Args:
            transport: The way of the bytes; `choose_transport` picks one.
            num_receivers: Ranks 0 to num_receivers - 1 receive each offer. Only `broadcast` and `cuda_ipc` need it.
            has_checksums: Lets receivers verify each tensor.
            timeout_s: `broadcast` only: how long to wait for a receiver to join or to take a bucket.
            host: `broadcast` only: under which address the receivers reach this machine.
            folder: `disk` only: where to write; a new temporary folder if None.
            like: `disk` only: a model folder whose other files (configuration, tokenizer) go along, so that each
                offer is a checkpoint that engines can load by themselves; its path is `handle.source["folder"]`.
            keep: `disk` only: leave what was written.
        """
        self._transport: Transport = transport
        self._is_closed = False
        self._sharing_key: Hashable | None = None
        if transport in ("shared_memory", "disk"):
            self._sharing_key = (transport, has_checksums, folder, like, keep)

        def make_backend() -> _Backend:
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

        self._backend = make_backend()
        self._base = _BaseOffer(make_backend)
        self._keeps_base = self._sharing_key is not None and like is None

    @property
    def transport(self) -> Transport:
        return self._transport

    @property
    def sharing_key(self) -> Hashable | None:
        """Equal for senders whose offers any receiver of either can take; None if receivers are counted."""
        return self._sharing_key

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @contextmanager
    def offer(self, weights: Iterable[tuple[str, Tensor]], *, weight_version: int) -> Generator[WeightHandle]:
        """Makes weights available while the context is open.

        Args:
            weights: Names and plain dense tensors, on one device. Copied when the context is entered, so that they
                may change afterwards; `broadcast` reads them while the context is open.
            weight_version: Travels with them.

        Raises:
            WeightsError: A tensor cannot be sent, there is no place for it, or (on leaving) a receiver of a
                broadcast did not take it in time.
        """
        if self._is_closed:
            raise WeightsError("this sender is closed; make a new one")
        if not isinstance(weights, AdaptedWeights) or not self._keeps_base:
            with self._backend.offer(weights, weight_version=weight_version) as handle:
                yield handle
            return
        base = self._base.open(weights, weight_version=weight_version)
        with self._backend.offer(weights.to_tensors(), weight_version=weight_version) as handle:
            yield replace(handle, base=base, base_id=weights.base_id)

    def close(self) -> None:
        """Gives back all that offers have set up. Can be called again."""
        if not self._is_closed:
            self._is_closed = True
            self._backend.close()
            self._base.close()

    def __enter__(self) -> WeightSender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _BaseOffer:
    """An offer of what lies below adapters, which stays open from update to update."""

    def __init__(self, make_backend: Callable[[], _Backend]) -> None:
        self._make_backend = make_backend
        self._open = ExitStack()
        self._base_id = ""
        self._handle: WeightHandle | None = None

    def open(self, weights: AdaptedWeights, *, weight_version: int) -> WeightHandle:
        """The handle of this base's offer. That of another base ends."""
        if self._handle is None or self._base_id != weights.base_id:
            self.close()
            backend = self._make_backend()
            self._open.callback(backend.close)
            offer = backend.offer(weights.base.items(), weight_version=weight_version)
            self._handle, self._base_id = self._open.enter_context(offer), weights.base_id
        return self._handle

    def close(self) -> None:
        self._handle = None
        self._open.close()


class _Backend(Protocol):
    """One transport."""

    def offer(self, weights: Iterable[tuple[str, Tensor]], *, weight_version: int) -> _Offer: ...

    def close(self) -> None: ...


class _Offer(Protocol):
    def __enter__(self) -> WeightHandle: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None: ...

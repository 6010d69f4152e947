"""Weight transfer through torch.distributed, for engines on other machines: gloo for CPU weights, NCCL for GPU weights.

The sender is rank 0 of a separate process group, and receiver r is rank r + 1. Neither side uses the default process
group, which the trainer or the engine may use. Each offer has a group of its own.

NCCL has not been tested.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed
from msgspec.structs import replace
from torch import Tensor

from agent_loop.errors import WeightsError
from agent_loop.weights.handle import TensorSpec, WeightHandle
from agent_loop.weights.tensors import checksum, from_bytes, pack

GLOO_BUCKET_BYTES = 4 << 20
"""Size that fits the CPU cache. Larger buckets need fresh memory pages on both sides and took more than twice as
long."""
NCCL_BUCKET_BYTES = 256 << 20
POLL_S = 0.005
JOIN, ABORTED = "join", "aborted"
"""Values of the rendezvous's `outcome_key`."""
GRACE_S = 5.0
"""Seconds to wait for the thread in addition to its own timeout."""
LOCAL_HOSTS = ("127.0.0.1", "localhost")

_torch: Any = torch.distributed


@dataclass(frozen=True, slots=True)
class _Rendezvous:
    """Address and settings with which the sender and the receivers of one offer form a process group."""

    host: str
    port: int
    offer: str
    """Prefix of the offer's keys in the store."""
    backend: str
    """`gloo` or `nccl`."""
    num_receivers: int
    timeout_s: float
    """Seconds for each rank to join, and for each bucket."""

    def ready_key(self, rank: int) -> str:
        """Return the store key that a receiver sets when it has the handle."""
        return f"{self.offer}/ready/{rank}"

    @property
    def outcome_key(self) -> str:
        """Store key that the sender sets to `JOIN` when all receivers are ready, or to `ABORTED`."""
        return f"{self.offer}/outcome"


class BroadcastSender:
    """Sender that owns the store for the rendezvous, and rank 0 of each offer's group."""

    def __init__(self, *, num_receivers: int, host: str, timeout_s: float) -> None:
        self._num_receivers = num_receivers
        self._host = host
        self._timeout_s = timeout_s
        self._store: Any = None
        self._num_offers = 0

    @contextlib.contextmanager
    def offer(self, weights: Iterable[tuple[str, Tensor]], *, weight_version: int) -> Generator[WeightHandle]:
        """Send weights in a thread, which exiting the context waits for. See `WeightSender.offer`."""
        tensors = list(weights)
        backend = "nccl" if tensors and tensors[0][1].device.type == "cuda" else "gloo"
        bucket_bytes = NCCL_BUCKET_BYTES if backend == "nccl" else GLOO_BUCKET_BYTES
        packed = [
            (replace(spec, checksum=checksum(data_N)), data_N)
            for spec, data_N in pack(tensors, bucket_bytes=bucket_bytes)
        ]
        specs = tuple(spec for spec, _ in packed)
        if self._store is None:
            self._store = serve_store(self._host, timeout=timedelta(seconds=self._timeout_s))
        self._num_offers += 1
        rendezvous = _Rendezvous(
            host=self._host,
            port=self._store.port,
            offer=f"offer-{self._num_offers}",
            backend=backend,
            num_receivers=self._num_receivers,
            timeout_s=self._timeout_s,
        )
        thread = _BroadcastThread(packed, rendezvous=rendezvous, store=self._store)
        try:
            yield WeightHandle("broadcast", weight_version, specs, asdict(rendezvous))
            thread.finish()
        except BaseException as error:
            thread.abort()
            if thread.error is not None and thread.error is not error:
                error.add_note(f"the broadcast failed too: {thread.error}")
            raise

    def close(self) -> None:
        self._store = None


def receive_broadcast(handle: WeightHandle, *, rank: int) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Yield tensors that own their memory. Stopping early closes the group, so that the sender fails."""
    rendezvous = _Rendezvous(**handle.source)
    if rank >= rendezvous.num_receivers:
        raise WeightsError(
            f"the offer is for {rendezvous.num_receivers} receivers, but this one has rank {rank}; set num_receivers"
        )
    store = _connect_store(rendezvous)
    try:
        store.set(rendezvous.ready_key(rank), "")
        outcome = store.get(rendezvous.outcome_key).decode()
    except RuntimeError as error:
        raise WeightsError(
            f"the sender of weights at {rendezvous.host}:{rendezvous.port} has ended, or waits for another receiver; "
            "check that all of them are running, and publish again"
        ) from error
    if outcome == ABORTED:
        raise WeightsError(
            "the sender aborted this offer of weights; see the sender's error, and publish again"
        )
    group = BroadcastGroup(store, rendezvous, rank=rank + 1)
    try:
        for _, members in groupby(handle.tensors, key=lambda spec: spec.bucket):
            specs = list(members)
            bucket_N = torch.empty(_size(specs), dtype=torch.uint8, device=group.device)
            group.broadcast(bucket_N)
            for spec in specs:
                yield spec, from_bytes(bucket_N[spec.offset : spec.offset + spec.num_bytes], spec)
    finally:
        group.leave()


class _BroadcastThread:
    """Broadcasts one offer in a thread, while the caller uses the control channel."""

    def __init__(
        self, packed: list[tuple[TensorSpec, Tensor]], *, rendezvous: _Rendezvous, store: Any
    ) -> None:
        self._packed = packed
        self._rendezvous = rendezvous
        self._store = store
        self._group: BroadcastGroup | None = None
        self._stop = threading.Event()
        self._leaving = threading.Lock()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="agent-loop-broadcast")
        self._thread.start()

    def finish(self) -> None:
        """Wait until the broadcast ends, and close the group."""
        self._thread.join(self._rendezvous.timeout_s + GRACE_S)
        if self._thread.is_alive():
            raise WeightsError(
                f"a receiver did not receive the weights within {self._rendezvous.timeout_s:g} s; exit the offer's "
                "context only when all receivers are done"
            )
        if self.error is not None:
            raise self.error
        self._leave()

    def abort(self) -> None:
        """Abort the broadcast: by the outcome before the receivers join, by closing the group afterwards."""
        self._stop.set()
        self._abort_receivers()
        self._thread.join(GRACE_S)

    def _run(self) -> None:
        try:
            self._await_receivers()
            if not self._stop.is_set():
                self._store.set(self._rendezvous.outcome_key, JOIN)
                self._group = BroadcastGroup(self._store, self._rendezvous, rank=0)
            buffer_N: Tensor | None = None
            for _, bucket in groupby(self._packed, key=lambda member: member[0].bucket):
                group, members = self._group, list(bucket)
                if group is None or self._stop.is_set():
                    self._abort_receivers()
                    return
                num_bytes = _size([spec for spec, _ in members])
                if buffer_N is None or len(buffer_N) < num_bytes:
                    buffer_N = torch.empty(num_bytes, dtype=torch.uint8, device=members[0][1].device)
                for spec, data_N in members:
                    buffer_N[spec.offset : spec.offset + spec.num_bytes].copy_(data_N)
                group.broadcast(buffer_N[:num_bytes])
        except Exception as error:  # noqa: BLE001  (raised again by `finish`)
            self.error = error
            self._abort_receivers()

    def _await_receivers(self) -> None:
        deadline = time.monotonic() + self._rendezvous.timeout_s
        waiting = set(range(self._rendezvous.num_receivers))
        while waiting and not self._stop.is_set():
            waiting = {rank for rank in waiting if not self._store.check([self._rendezvous.ready_key(rank)])}
            if waiting and time.monotonic() > deadline:
                raise WeightsError(
                    f"of {self._rendezvous.num_receivers} receivers of a broadcast, {sorted(waiting)} did not join "
                    f"within {self._rendezvous.timeout_s:g} s; check that they are running, have the handle, and can "
                    f"reach {self._rendezvous.host}:{self._rendezvous.port}"
                )
            if waiting:
                self._stop.wait(POLL_S)

    def _abort_receivers(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(self._rendezvous.outcome_key, ABORTED)
        self._leave()

    def _leave(self) -> None:
        with self._leaving:
            group, self._group = self._group, None
        if group is not None:
            group.leave()


def _size(specs: list[TensorSpec]) -> int:
    return specs[-1].offset + specs[-1].num_bytes


class BroadcastGroup:
    """One rank of an offer's process group, which is not the default one. Creating it waits for all ranks."""

    def __init__(self, store: Any, rendezvous: _Rendezvous, *, rank: int) -> None:
        self._group: Any
        self._backend = rendezvous.backend
        self.device = torch.device("cpu")
        """Device for the buckets of a receiver."""
        own_store = _torch.PrefixStore(f"{rendezvous.offer}/ranks", store)
        size, timeout = rendezvous.num_receivers + 1, timedelta(seconds=rendezvous.timeout_s)
        try:
            if rendezvous.backend == "nccl":
                self.device = torch.device("cuda", torch.cuda.current_device())
                options = _torch.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._group = _torch.ProcessGroupNCCL(own_store, rank, size, options)
            elif rendezvous.host in LOCAL_HOSTS:
                options = _torch.ProcessGroupGloo._Options()
                options._timeout = timeout
                options._devices = [_torch.ProcessGroupGloo.create_device(hostname=rendezvous.host)]
                self._group = _torch.ProcessGroupGloo(own_store, rank, size, options)
            else:
                # torch chooses the network interface, from GLOO_SOCKET_IFNAME or the host name.
                self._group = _torch.ProcessGroupGloo(own_store, rank, size, timeout)
        except RuntimeError as error:
            raise WeightsError(
                f"rank {rank} could not join the broadcast's group of {size}: {_first_line(error)}; check that all "
                "ranks are running and can reach each other"
            ) from error

    def broadcast(self, bucket_N: Tensor) -> None:
        """Broadcast a bucket from rank 0 to all others. Return when this rank has sent or received it."""
        try:
            self._group.broadcast(bucket_N, 0).wait()
        except RuntimeError as error:
            raise WeightsError(
                f"the broadcast failed ({_first_line(error)}); see the errors of the other side, and publish again"
            ) from error
        if self._backend == "nccl":
            torch.cuda.synchronize(bucket_N.device)

    def leave(self) -> None:
        """Close the connections, so that pending calls of other ranks fail instead of waiting."""
        self._group.abort()
        self._group = None


def serve_store(host: str, **options: Any) -> Any:
    """Open a `TCPStore` on a free port, only on the interface of `host`. By default torch listens on all interfaces.

    It listens on all interfaces if `host` is not an address of this machine, for example because a router forwards it.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family)
    except OSError:
        listener = socket.create_server(("", 0))
    port = listener.getsockname()[1]
    return _torch.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), **options
    )


def _connect_store(rendezvous: _Rendezvous) -> Any:
    """Connect a receiver to the sender's store."""
    timeout = timedelta(seconds=rendezvous.timeout_s)
    try:
        return _torch.TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=timeout)
    except RuntimeError as error:
        raise WeightsError(
            f"no sender of weights answers at {rendezvous.host}:{rendezvous.port} ({_first_line(error)}); check "
            "that it is running, and give it a host that this machine can reach"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]

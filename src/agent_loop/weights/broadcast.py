"""Weight transfer through torch.distributed, for engines on other machines: gloo for CPU weights, NCCL for GPU weights.

The sender is rank 0 of a separate process group, and receiver r is rank r + 1. Neither side uses the default process
group, which the trainer or the engine may use. The group is reused by later offers, and replaced after a failure.

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
from agent_loop.weights.handle import TensorSpec, WeightHandle, refuse_duplicates
from agent_loop.weights.tensors import checksum, from_bytes, pack

GLOO_BUCKET_BYTES = 4 << 20
"""Size that fits the CPU cache. Larger buckets need fresh memory pages on both sides and took more than twice as
long."""
NCCL_BUCKET_BYTES = 256 << 20
POLL_S = 0.005
ABORTED = "aborted"
"""Value of the rendezvous's `group_key` for an aborted offer."""
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
        """Return the store key that a receiver sets when it has the handle.

        Its value is the key of the receiver's current group, or an empty string.
        """
        return f"{self.offer}/ready/{rank}"

    @property
    def group_key(self) -> str:
        """Store key that the sender sets when all receivers are ready. Its value is the key of the group to join."""
        return f"{self.offer}/group"


class BroadcastSender:
    """Sender that owns the store for the rendezvous, and rank 0 of the group."""

    def __init__(self, *, num_receivers: int, host: str, timeout_s: float) -> None:
        self._num_receivers = num_receivers
        self._host = host
        self._timeout_s = timeout_s
        self._store: Any = None
        self._group: BroadcastGroup | None = None
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
        refuse_duplicates(specs)
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
        group, self._group = self._group, None
        thread = _BroadcastThread(packed, rendezvous=rendezvous, store=self._store, group=group)
        try:
            yield WeightHandle("broadcast", weight_version, specs, asdict(rendezvous))
            self._group = thread.finish()
        except BaseException as error:
            thread.abort()
            if thread.error is not None and thread.error is not error:
                error.add_note(f"the broadcast failed too: {thread.error}")
            raise

    def close(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group = self._store = None


class BroadcastReceiver:
    """Receiver's rank of the group."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._address: tuple[str, int] | None = None
        self._store: Any = None
        self._group: BroadcastGroup | None = None

    def receive(self, handle: WeightHandle) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Yield tensors that own their memory. Stopping early closes the group, so that the sender fails."""
        rendezvous = _Rendezvous(**handle.source)
        if self._rank >= rendezvous.num_receivers:
            raise WeightsError(
                f"the offer is for {rendezvous.num_receivers} receivers, but this one has rank {self._rank}; set "
                "num_receivers"
            )
        is_complete = False
        try:
            group = self._join(rendezvous)
            for _, members in groupby(handle.tensors, key=lambda spec: spec.bucket):
                specs = list(members)
                bucket_N = torch.empty(_size(specs), dtype=torch.uint8, device=group.device)
                group.broadcast(bucket_N)
                for spec in specs:
                    yield spec, from_bytes(bucket_N[spec.offset : spec.offset + spec.num_bytes], spec)
            is_complete = True
        finally:
            if not is_complete:
                self.close()

    def close(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group = self._store = self._address = None

    def _join(self, rendezvous: _Rendezvous) -> BroadcastGroup:
        if self._address != (rendezvous.host, rendezvous.port):
            self.close()
            self._store = _connect_store(rendezvous)
            self._address = (rendezvous.host, rendezvous.port)
        try:
            self._store.set(rendezvous.ready_key(self._rank), self._group.key if self._group else "")
            key = self._store.get(rendezvous.group_key).decode()
        except RuntimeError as error:
            raise WeightsError(
                f"the sender of weights at {rendezvous.host}:{rendezvous.port} has ended, or waits for another "
                "receiver; check that all of them are running, and publish again"
            ) from error
        if key == ABORTED:
            raise WeightsError(
                "the sender aborted this offer of weights; see the sender's error, and publish again"
            )
        if self._group is None or self._group.key != key:
            if self._group is not None:
                self._group.leave()
            self._group = BroadcastGroup.join(self._store, rendezvous, key=key, rank=self._rank + 1)
        return self._group


class _BroadcastThread:
    """Broadcasts one offer in a thread, while the caller uses the control channel."""

    def __init__(
        self,
        packed: list[tuple[TensorSpec, Tensor]],
        *,
        rendezvous: _Rendezvous,
        store: Any,
        group: BroadcastGroup | None,
    ) -> None:
        self._packed = packed
        self._rendezvous = rendezvous
        self._store = store
        self._group = group
        self._stop = threading.Event()
        self._leaving = threading.Lock()
        self._buffer_N: Tensor | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="agent-loop-broadcast")
        self._thread.start()

    def finish(self) -> BroadcastGroup | None:
        """Wait until the broadcast ends, and return the group for the next offer."""
        self._thread.join(self._rendezvous.timeout_s + GRACE_S)
        if self._thread.is_alive():
            raise WeightsError(
                f"a receiver did not receive the weights within {self._rendezvous.timeout_s:g} s; exit the offer's "
                "context only when all receivers are done"
            )
        if self.error is not None:
            raise self.error
        return self._group

    def abort(self) -> None:
        """Abort the broadcast and close the group."""
        self._stop.set()
        self._abort_receivers()
        self._thread.join(GRACE_S)

    def _run(self) -> None:
        try:
            self._await_receivers()
            if not self._stop.is_set():
                self._join_group()
            for _, members in groupby(self._packed, key=lambda member: member[0].bucket):
                group = self._group
                if group is None or self._stop.is_set():
                    self._abort_receivers()
                    return
                group.broadcast(self._fill(list(members)))
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

    def _join_group(self) -> None:
        """Join one group with all ranks: the current group, or a new one if a receiver was replaced."""
        rendezvous, store = self._rendezvous, self._store
        keys = {store.get(rendezvous.ready_key(rank)).decode() for rank in range(rendezvous.num_receivers)}
        if self._group is not None and (
            keys != {self._group.key} or self._group.backend != rendezvous.backend
        ):
            self._group.leave()
            self._group = None
        key = self._group.key if self._group else f"{rendezvous.offer}/ranks"
        store.set(rendezvous.group_key, key)
        if self._group is None:
            self._group = BroadcastGroup.join(store, rendezvous, key=key, rank=0)

    def _abort_receivers(self) -> None:
        """Abort the waiting receivers: by the group's key before they join it, by closing the group afterwards."""
        with self._leaving:
            group, self._group = self._group, None
        with contextlib.suppress(RuntimeError):
            self._store.set(self._rendezvous.group_key, ABORTED)
        if group is not None:
            group.leave()

    def _fill(self, members: list[tuple[TensorSpec, Tensor]]) -> Tensor:
        num_bytes = _size([spec for spec, _ in members])
        if self._buffer_N is None or len(self._buffer_N) < num_bytes:
            self._buffer_N = torch.empty(num_bytes, dtype=torch.uint8, device=members[0][1].device)
        bucket_N = self._buffer_N[:num_bytes]
        for spec, data_N in members:
            bucket_N[spec.offset : spec.offset + spec.num_bytes].copy_(data_N)
        return bucket_N


def _size(specs: list[TensorSpec]) -> int:
    return specs[-1].offset + specs[-1].num_bytes


class BroadcastGroup:
    """One rank of a process group other than the default one."""

    def __init__(self, group: Any, *, key: str, backend: str) -> None:
        self._group: Any = group
        self.key = key
        """Key that is unique to the group within its store."""
        self.backend = backend
        self.device = torch.device("cpu")
        """Device for the buckets of a receiver."""
        if backend == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())

    @classmethod
    def join(cls, store: Any, rendezvous: _Rendezvous, *, key: str, rank: int) -> BroadcastGroup:
        """Join a group and wait for all its ranks."""
        own_store = _torch.PrefixStore(key, store)
        size, timeout = rendezvous.num_receivers + 1, timedelta(seconds=rendezvous.timeout_s)
        try:
            if rendezvous.backend == "nccl":
                options = _torch.ProcessGroupNCCL.Options()
                options._timeout = timeout
                group = _torch.ProcessGroupNCCL(own_store, rank, size, options)
            elif rendezvous.host in LOCAL_HOSTS:
                options = _torch.ProcessGroupGloo._Options()
                options._timeout = timeout
                options._devices = [_torch.ProcessGroupGloo.create_device(hostname=rendezvous.host)]
                group = _torch.ProcessGroupGloo(own_store, rank, size, options)
            else:
                # torch chooses the network interface, from GLOO_SOCKET_IFNAME or the host name.
                group = _torch.ProcessGroupGloo(own_store, rank, size, timeout)
        except RuntimeError as error:
            raise WeightsError(
                f"rank {rank} could not join the broadcast's group of {size}: {_first_line(error)}; check that all "
                "ranks are running and can reach each other"
            ) from error
        return cls(group, key=key, backend=rendezvous.backend)

    def broadcast(self, bucket_N: Tensor) -> None:
        """Broadcast a bucket from rank 0 to all others. Return when this rank has sent or received it.

        Raises:
            WeightsError: Another rank left, or did not send or receive the bucket in time.
        """
        try:
            self._group.broadcast(bucket_N, 0).wait()
        except RuntimeError as error:
            raise WeightsError(
                f"the broadcast failed ({_first_line(error)}); see the errors of the other side, and publish again"
            ) from error
        if self.backend == "nccl":
            torch.cuda.synchronize(bucket_N.device)

    def leave(self) -> None:
        """Close the connections, so that pending calls of other ranks fail instead of waiting."""
        self._group.abort()
        self._group = None


def serve_store(host: str, **options: Any) -> Any:
    """Open a `TCPStore` on a free port, only on the interface of `host`. By default torch listens on all interfaces.

    It listens on all interfaces if `host` is not an address of this machine, for example because a router forwards it.

    Args:
        host: Address for the ranks to connect to.
        options: Further arguments of `TCPStore`.
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

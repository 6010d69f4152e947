"""Process group of a broadcast: the rendezvous of its ranks, and the layout of a bucket."""

from __future__ import annotations

import socket
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from agent_loop.errors import WeightsError
from agent_loop.weights.handle import TensorSpec, WeightHandle
from agent_loop.weights.packing import align

CHECKSUM_BYTES = 8
LOCAL_HOSTS = ("127.0.0.1", "localhost")

_torch: Any = torch.distributed


@dataclass(frozen=True, slots=True)
class BroadcastRendezvous:
    """Where and how sender and receivers of one offer form a process group."""

    host: str
    port: int
    offer: str
    """Prefix of the offer's keys in the store."""
    backend: str
    """`gloo` or `nccl`."""
    num_receivers: int
    timeout_s: float
    """Seconds for each rank to join, and for each bucket."""

    def to_source(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_handle(cls, handle: WeightHandle) -> BroadcastRendezvous:
        """Read a rendezvous from the handle's source.

        Raises:
            WeightsError: A field is missing.
        """
        return cls(
            host=handle.field("host", str),
            port=handle.field("port", int),
            offer=handle.field("offer", str),
            backend=handle.field("backend", str),
            num_receivers=handle.field("num_receivers", int),
            timeout_s=handle.field("timeout_s", float),
        )

    def ready_key(self, rank: int) -> str:
        """Return the store key that a receiver sets when it has the handle.

        Its value is the key of the receiver's current group, or an empty string.
        """
        return f"{self.offer}/ready/{rank}"

    @property
    def group_key(self) -> str:
        """Store key that the sender sets when all receivers are ready. Its value is the key of the group to join."""
        return f"{self.offer}/group"


def open_store(host: str, *, timeout_s: float) -> Any:
    """Open the sender's store on a free port of `host`."""
    timeout = timedelta(seconds=timeout_s)
    return serve_store(host, timeout=timeout)


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


def connect_store(rendezvous: BroadcastRendezvous) -> Any:
    """Connect a receiver to the sender's store.

    Raises:
        WeightsError: The connection is not established in time.
    """
    timeout = timedelta(seconds=rendezvous.timeout_s)
    try:
        return _torch.TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=timeout)
    except RuntimeError as error:
        raise WeightsError(
            f"no sender of weights answers at {rendezvous.host}:{rendezvous.port} ({_first_line(error)}); check "
            "that it is running, and give it a host that this machine can reach"
        ) from error


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
    def join(cls, store: Any, rendezvous: BroadcastRendezvous, *, key: str, rank: int) -> BroadcastGroup:
        """Join a group and wait for all its ranks.

        Raises:
            WeightsError: A rank did not join in time.
        """
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


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Layout of a bucket: the tensors at their offsets, then a checksum of 8 bytes for each tensor."""

    checksums_at: int
    num_bytes: int

    @classmethod
    def of(cls, specs: list[TensorSpec], *, has_checksums: bool) -> BucketLayout:
        end = align(specs[-1].offset + specs[-1].num_bytes)
        return cls(checksums_at=end, num_bytes=end + (CHECKSUM_BYTES * len(specs) if has_checksums else 0))

    def write_checksums(self, bucket_N: Tensor, checksums: list[int]) -> None:
        """Write the checksums to the end of a bucket."""
        bucket_N[self.checksums_at :].copy_(torch.tensor(checksums, dtype=torch.int64).view(torch.uint8))

    def read_checksums(self, bucket_N: Tensor) -> list[int]:
        """Return the checksum of each tensor, or an empty list if the bucket has no checksums."""
        values: Any = bucket_N[self.checksums_at :].cpu().view(torch.int64)
        return values.tolist()


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]

"""The process group of a broadcast: where its ranks meet, and what one bucket looks like between them."""

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
class Meeting:
    """Where and how the two sides meet for one offer."""

    host: str
    port: int
    offer: str
    """Begins the keys of this offer in the store."""
    backend: str
    """`gloo` or `nccl`."""
    num_receivers: int
    timeout_s: float
    """For each rank to join, and for each bucket."""

    def to_source(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_handle(cls, handle: WeightHandle) -> Meeting:
        """Raises: WeightsError: A field is missing."""
        return cls(
            host=handle.field("host", str),
            port=handle.field("port", int),
            offer=handle.field("offer", str),
            backend=handle.field("backend", str),
            num_receivers=handle.field("num_receivers", int),
            timeout_s=handle.field("timeout_s", float),
        )

    def ready_key(self, rank: int) -> str:
        """Set by a receiver that has the handle, to the key of the group that it is in, or nothing."""
        return f"{self.offer}/ready/{rank}"

    @property
    def group_key(self) -> str:
        """Set by the sender when all are ready, to the key of the group that all are to be in."""
        return f"{self.offer}/group"


def open_store(host: str, *, timeout_s: float) -> Any:
    """The sender's store, on a free port of `host`."""
    timeout = timedelta(seconds=timeout_s)
    return serve_store(host, timeout=timeout)


def serve_store(host: str, **options: Any) -> Any:
    """Open a `TCPStore` on a free port and serve it at `host` alone; left to itself, torch serves it on all interfaces,
    to anyone. Where `host` is no address of this machine, because a router forwards it, there is no other way.

    Args:
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


def connect_store(meeting: Meeting) -> Any:
    """A receiver's connection to it.

    Raises:
        WeightsError: Nobody answers there in time.
    """
    timeout = timedelta(seconds=meeting.timeout_s)
    try:
        return _torch.TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout)
    except RuntimeError as error:
        raise WeightsError(
            f"no sender of weights answers at {meeting.host}:{meeting.port} ({_first_line(error)}); see whether it "
            "lives, and give it a host that this machine can reach"
        ) from error


class BroadcastGroup:
    """One rank's end of a process group that is not the default one."""

    def __init__(self, group: Any, *, key: str, backend: str) -> None:
        self._group: Any = group
        self.key = key
        """Differs from group to group at one store."""
        self.backend = backend
        self.device = torch.device("cpu")
        """Where a receiver's buckets belong."""
        if backend == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())

    @classmethod
    def join(cls, store: Any, meeting: Meeting, *, key: str, rank: int) -> BroadcastGroup:
        """Waits for all ranks.

        Raises:
            WeightsError: One did not come in time.
        """
        own_store = _torch.PrefixStore(key, store)
        size, timeout = meeting.num_receivers + 1, timedelta(seconds=meeting.timeout_s)
        try:
            if meeting.backend == "nccl":
                options = _torch.ProcessGroupNCCL.Options()
                options._timeout = timeout
                group = _torch.ProcessGroupNCCL(own_store, rank, size, options)
            elif meeting.host in LOCAL_HOSTS:
                options = _torch.ProcessGroupGloo._Options()
                options._timeout = timeout
                options._devices = [_torch.ProcessGroupGloo.create_device(hostname=meeting.host)]
                group = _torch.ProcessGroupGloo(own_store, rank, size, options)
            else:
                # torch picks the network interface: that of GLOO_SOCKET_IFNAME or of the host's name.
                group = _torch.ProcessGroupGloo(own_store, rank, size, timeout)
        except RuntimeError as error:
            raise WeightsError(
                f"rank {rank} could not join the broadcast's group of {size}: {_first_line(error)}; see whether all "
                "ranks live and reach each other"
            ) from error
        return cls(group, key=key, backend=meeting.backend)

    def broadcast(self, bucket_N: Tensor) -> None:
        """From rank 0 to all others; returns when this rank's part is done.

        Raises:
            WeightsError: Another rank left, or did not do its part in time.
        """
        try:
            self._group.broadcast(bucket_N, 0).wait()
        except RuntimeError as error:
            raise WeightsError(
                f"the broadcast broke off ({_first_line(error)}); see what ended the other side, and publish again"
            ) from error
        if self.backend == "nccl":
            torch.cuda.synchronize(bucket_N.device)

    def leave(self) -> None:
        """Breaks the connections, so that calls of other ranks fail instead of waiting."""
        self._group.abort()
        self._group = None


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """A bucket between ranks: the tensors at their offsets, then 8 bytes of checksum for each."""

    checksums_at: int
    num_bytes: int

    @classmethod
    def of(cls, specs: list[TensorSpec], *, has_checksums: bool) -> BucketLayout:
        end = align(specs[-1].offset + specs[-1].num_bytes)
        return cls(checksums_at=end, num_bytes=end + (CHECKSUM_BYTES * len(specs) if has_checksums else 0))

    def write_checksums(self, bucket_N: Tensor, checksums: list[int]) -> None:
        """Fills the end of a bucket."""
        bucket_N[self.checksums_at :].copy_(torch.tensor(checksums, dtype=torch.int64).view(torch.uint8))

    def read_checksums(self, bucket_N: Tensor) -> list[int]:
        """One per tensor, or none at all."""
        values: Any = bucket_N[self.checksums_at :].cpu().view(torch.int64)
        return values.tolist()


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]

"""Process group of a training. Each rank holds a shard of the model and computes a share of every mini-batch.

All ranks make the same calls in the same order, because a collective call waits for every rank. Rank 0 sends commands
to the other ranks (`on_all_ranks`), which they run at the same time as rank 0.
"""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agent_loop.weights.broadcast import serve_store

LOOPBACK = "127.0.0.1"
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Time limit of collective calls within an update."""
COMMAND_TIMEOUT = timedelta(days=30)
"""Time limit of waiting for the next command, since a rollout may take long. A rank that ends is noticed at once."""
ValueT = TypeVar("ValueT")
dist: Any = torch.distributed


@dataclass(frozen=True, slots=True)
class RankCommand:
    """Method of the learner that all ranks call."""

    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(kw_only=True, eq=False)
class ProcessGroup:
    """Process group as one rank sees it; by default that of a single process. One call at a time, from any thread."""

    rank: int = 0
    """Number of this process; rank 0 sends the commands."""
    size: int = 1
    mesh: DeviceMesh | None = None
    """Mesh over which models are sharded; None does not shard them."""
    commands: torch.distributed.ProcessGroup | None = None
    """Group of torch that carries the commands of rank 0."""
    is_in_command: bool = False
    """A command is running, and other ranks may wait for this one."""

    @contextmanager
    def on_all_ranks(self, method: str, **arguments: Any) -> Generator[None]:
        """Run the body as this rank's part of a command. Rank 0 sends the command to the other ranks."""
        if self.rank == 0:
            self._broadcast(RankCommand(method, arguments))
        self.is_in_command = True
        yield
        self.is_in_command = False  # stays True after an error, which leaves the other ranks in the command

    def stop_other_ranks(self) -> None:
        """Let the other ranks end."""
        self._broadcast(None)

    def next_command(self) -> RankCommand | None:
        """Wait for the next command of rank 0 and return it; None ends this rank."""
        return self._broadcast(None)

    def all_gather(self, value: ValueT) -> list[ValueT]:
        """Return the values of all ranks, by rank. For small objects, not for tensors of the model."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def sum_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the sums of all ranks. A name that a rank lacks counts as 0 there."""
        total: defaultdict[str, float] = defaultdict(float)
        for each in self.all_gather(dict(sums)):
            for name, value in each.items():
                total[name] += value
        return dict(total)

    def sum_tensor(self, values: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def _broadcast(self, command: RankCommand | None) -> RankCommand | None:
        """Return rank 0's command, on every rank."""
        commands = [command]
        if self.size > 1:
            dist.broadcast_object_list(commands, src=0, group=self.commands)
        return commands[0]


SINGLE_PROCESS = ProcessGroup()


def open_store(size: int, *, host: str, port: int = 0) -> Any:
    """Open the store through which the ranks find each other.

    Rank 0 calls this without a port and serves the store; the other ranks connect to its port. On loopback, the
    connections between the ranks use loopback too.
    """
    if host == LOOPBACK:
        names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if names else ():
            os.environ.setdefault(variable, names[0])
    if port == 0:
        return serve_store(host, world_size=size)
    return dist.TCPStore(host, port, world_size=size, is_master=False, wait_for_workers=False)


def join_process_group(device: torch.device, **rendezvous: Any) -> ProcessGroup:
    """Wait until all ranks have joined, and return the group. Call `leave_process_group` at the end."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, **rendezvous)
    return ProcessGroup(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        mesh=init_device_mesh(device.type, (dist.get_world_size(),)),
        commands=dist.new_group(backend="gloo", timeout=COMMAND_TIMEOUT),
    )


def leave_process_group() -> None:
    dist.destroy_process_group()

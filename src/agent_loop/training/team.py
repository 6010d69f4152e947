"""Several processes that train one model. Each holds a shard of it and takes a share of every mini-batch.

All processes make the same calls in the same order, for a call that only some of them make waits for the others. Rank 0
decides which: what it does in `together`, the others are told to do too.
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

from agent_loop.weights.broadcast_group import serve_store

LOOPBACK = "127.0.0.1"
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""How long a process waits for the others in the middle of an update."""
ORDER_TIMEOUT = timedelta(days=30)
"""How long it waits for the next order: a rollout may take its time. A process that ends is noticed at once."""
ValueT = TypeVar("ValueT")
dist: Any = torch.distributed


@dataclass(frozen=True, slots=True)
class Order:
    """A method of the learner for all processes to call."""

    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Team:
    """The processes of a training, as one of them sees them. One call at a time, from any thread."""

    def __init__(
        self,
        *,
        rank: int = 0,
        size: int = 1,
        mesh: DeviceMesh | None = None,
        orders: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        """Without arguments: this process alone.

        Args:
            rank: The number of this process; 0 leads.
            size: How many there are.
            mesh: Over which models are sharded; None leaves them whole.
            orders: For what rank 0 tells the others.
        """
        self.rank = rank
        self.size = size
        self.mesh = mesh
        self.is_together = False
        """The others may be in the middle of what they were told, and wait for this process."""
        self._orders = orders

    @contextmanager
    def together(self, method: str, **arguments: Any) -> Generator[None]:
        """Its body is this process's part of a call of the learner's that all make."""
        if self.rank == 0:
            self._tell(Order(method, arguments))
        self.is_together = True
        yield
        self.is_together = False  # not after an error, which leaves the others where they are

    def dismiss(self) -> None:
        """Lets the others end."""
        self._tell(None)

    def next_order(self) -> Order | None:
        """Waits for what rank 0 says; None is to end."""
        return self._tell(None)

    def collect(self, value: ValueT) -> list[ValueT]:
        """What each process gave, by rank. For small things, not for tensors of the model."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def sum_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The sums of all processes; a process may lack a name."""
        total: defaultdict[str, float] = defaultdict(float)
        for each in self.collect(dict(sums)):
            for name, value in each.items():
                total[name] += value
        return dict(total)

    def sum_tensor(self, values: Tensor) -> Tensor:
        """In place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def _tell(self, order: Order | None) -> Order | None:
        """Rank 0's order, in all processes."""
        orders = [order]
        if self.size > 1:
            dist.broadcast_object_list(orders, src=0, group=self._orders)
        return orders[0]


ALONE = Team()


def open_store(size: int, *, host: str, port: int = 0) -> Any:
    """Where the processes meet: on the first one's machine, which opens it without a port, the others with its port.

    On loopback, the connections between the processes stay there too.
    """
    if host == LOOPBACK:
        names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if names else ():
            os.environ.setdefault(variable, names[0])
    if port == 0:
        return serve_store(host, world_size=size)
    return dist.TCPStore(host, port, world_size=size, is_master=False, wait_for_workers=False)


def join_team(device: torch.device, **meeting: Any) -> Team:
    """Returns when all processes are there. `leave_team` is to follow.

    Args:
        device: The kind of device on which each process has its shard.
        meeting: What `init_process_group` needs to find the others, where the environment does not say it.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, **meeting)
    return Team(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        mesh=init_device_mesh(device.type, (dist.get_world_size(),)),
        orders=dist.new_group(backend="gloo", timeout=ORDER_TIMEOUT),
    )


def leave_team() -> None:
    """Undoes `join_team`."""
    dist.destroy_process_group()

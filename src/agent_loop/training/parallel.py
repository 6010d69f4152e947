"""Several processes that train one model: each holds a shard of it (FSDP2) and takes a share of every mini-batch.

All processes make the same calls in the same order: a call that only one of them makes waits for the others.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training.micro_batches import MicroBatch, micro_batches

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""How long a process waits for the others in the middle of an update."""
ORDER_TIMEOUT = timedelta(days=30)
"""How long it waits for the next order: a rollout may take its time. A process that ends is noticed at once."""
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class Team:
    """The processes of this training, as one of them sees them."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    """None in a training of one process, whose model is not sharded."""
    orders: dist.ProcessGroup | None = None
    """For what rank 0 tells the others."""

    def shard(self, model: PreTrainedModel) -> None:
        """Leaves this process its share of each parameter. Gradients are summed over processes."""
        if self.mesh is None:
            return
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        for module in [*layers, model]:
            fully_shard(module, mesh=self.mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # the one reduction that gloo has

    def collect(self, value: ValueT) -> list[ValueT]:
        """What each process gave, by rank. For small things: metrics, not tensors of the model."""
        if self.mesh is None:
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
        if self.mesh is not None:
            dist.all_reduce(values)
        return values

    def order(self, order: ValueT | None = None) -> ValueT:
        """Rank 0 gives an order, which all return."""
        orders: list[Any] = [order]
        dist.broadcast_object_list(orders, src=0, group=self.orders)
        return orders[0]


ALONE = Team()


@contextmanager
def join_team(device: torch.device) -> Generator[Team]:
    """The team that `torchrun` started this process in; without it, a team of one."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    try:
        orders = dist.new_group(backend="gloo", timeout=ORDER_TIMEOUT)
        yield Team(
            rank=dist.get_rank(), size=size, mesh=init_device_mesh(device.type, (size,)), orders=orders
        )
    finally:
        dist.destroy_process_group()


def shared_micro_batches(
    batch: RolloutBatch,
    *,
    rows: Tensor,
    team: Team,
    max_tokens: int,
    device: torch.device,
    use_packing: bool = False,
) -> Iterator[tuple[MicroBatch, bool]]:
    """What this process runs of the rows, each with whether it counts.

    Rows are dealt by length, so that the shares are about as many tokens. All processes run as many micro-batches: one
    with fewer runs some again, which do not count.
    """

    def cut(own_rows: Tensor) -> Iterator[MicroBatch]:
        return micro_batches(
            batch, rows=own_rows, max_tokens=max_tokens, device=device, use_packing=use_packing
        )

    if team.size == 1:
        yield from ((micro_batch, True) for micro_batch in cut(rows))
        return
    lengths = batch["attention_mask"][rows].sum(dim=1)
    longest_first = rows[lengths.argsort(descending=True, stable=True)]
    own_rows = longest_first[team.rank :: team.size]
    own = list(cut(own_rows)) if len(own_rows) else []
    num_passes = max(team.collect(len(own)))
    yield from ((micro_batch, True) for micro_batch in own)
    again = own[-1] if own else next(cut(longest_first[-1:]))
    for _ in range(num_passes - len(own)):
        yield again, False


def whole(tensor: Tensor) -> Tensor:
    """The tensor that this one is a shard of; a tensor that is no shard as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """This process's shard of a whole tensor, cut as the parameter is; all processes hold the same whole."""
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    return distribute_tensor(
        tensor.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )


def save_whole(model: PreTrainedModel, folder: str | None) -> None:
    """Writes what `transformers` loads. All processes call it; the one with a folder writes."""
    gathered: dict[int, Tensor] = {}  # tied weights stay tied
    state: dict[str, Tensor] = {}
    for name, value in tensors_of(model):
        if id(value) not in gathered:
            full = whole(value.detach())
            gathered[id(value)] = full.cpu() if folder is not None else full.new_empty(0)
        state[name] = gathered[id(value)]
    if folder is not None:
        cast(Any, model).save_pretrained(folder, state_dict=state)


def tensors_of(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Parameters and buffers by the names of the state dict, tied ones under each of their names."""
    persistent = model.state_dict().keys()
    yield from model.named_parameters(remove_duplicate=False)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in persistent:
            yield name, buffer

"""Which node a server goes to. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster."""

    id: str
    num_cpus: float
    num_gpus: float


def place_servers(
    num_servers: int, *, nodes: Sequence[Node], num_cpus: float, num_gpus: float
) -> list[str | None]:
    """A node for each server: where most of what it needs is left, and the same at each start.

    None where no node has a place: then Ray waits for one.
    """
    free = {node.id: [node.num_gpus, node.num_cpus] for node in nodes}
    placed: list[str | None] = []
    for _ in range(num_servers):
        fitting = [node.id for node in nodes if free[node.id][0] >= num_gpus and free[node.id][1] >= num_cpus]
        best = max(fitting, key=lambda node: free[node], default=None)
        if best is not None:
            free[best][0] -= num_gpus
            free[best][1] -= num_cpus
        placed.append(best)
    return placed

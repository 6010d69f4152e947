"""Assignment of servers to nodes. Pure: no I/O."""

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
    """Return the id of a node for each server: the node with the most free GPUs, then CPUs. Deterministic.

    The id is None if no node has enough resources. Ray then waits for a node.
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

"""Placement of servers on nodes."""

from __future__ import annotations

from agent_loop.distributed.cluster import Node, place_servers


def test_servers_are_placed_on_the_node_with_the_most_free_resources() -> None:
    nodes = [Node("cpu", 64, 0), Node("a", 16, 2), Node("b", 16, 4)]
    assert place_servers(6, nodes=nodes, num_cpus=1, num_gpus=1) == ["b", "b", "a", "b", "a", "b"]
    assert place_servers(3, nodes=nodes, num_cpus=32, num_gpus=0) == ["cpu", "cpu", None]
    assert place_servers(1, nodes=[], num_cpus=1, num_gpus=0) == [None]


def test_servers_without_gpus_are_placed_on_the_node_with_the_most_free_cpus() -> None:
    nodes = [Node("a", 4, 0), Node("b", 4, 0)]
    assert place_servers(4, nodes=nodes, num_cpus=1, num_gpus=0) == ["a", "b", "a", "b"]

"""Makespans of a simulated cluster with `rollout.max_concurrent: auto`, in relation to beginning all at once.

    python benchmarks/bench_admission.py [--seeds 2]

Two simulated servers of 64 places; the KV cache of each and the number of trajectories vary. Everything between the
agent loops and the servers is what runs for real. Some ten seconds per row.
"""

from __future__ import annotations

import argparse
from statistics import geometric_mean

from rich.console import Console
from rich.table import Table

from agent_loop.simulation.cluster import SimulatedCluster, simulate
from agent_loop.simulation.engine import EngineModel
from agent_loop.simulation.report import SimulationOutcome
from agent_loop.simulation.workload import Workload

NUM_SERVERS = 2
SETTINGS = (
    (800, (60_000, 100_000, 200_000, 400_000, 2_400_000)),
    (200, (100_000, 200_000, 400_000, 800_000)),
)
"""Trajectories per server, and tokens that a server's KV cache holds."""


def prefix_hits(outcome: SimulationOutcome) -> float:
    """Of the prompt tokens that a server had known before, the share that it still had."""
    known = sum(ended.num_known_tokens for ended in outcome.ended)
    return sum(ended.num_cached_tokens for ended in outcome.ended) / known


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2)
    seeds = range(parser.parse_args().seeds)
    table = Table("per server", "KV cache", "auto to all at once", "each seed", "prefix hits", "with auto")
    for per_server, sizes in SETTINGS:
        workloads = [Workload(num_trajectories=NUM_SERVERS * per_server, seed=seed).plans() for seed in seeds]
        for kv_tokens in sizes:
            cluster = SimulatedCluster(num_servers=NUM_SERVERS, model=EngineModel(kv_tokens=kv_tokens))
            adapting = SimulatedCluster(num_servers=NUM_SERVERS, model=cluster.model, max_concurrent="auto")
            pairs = [(simulate(cluster, plans), simulate(adapting, plans)) for plans in workloads]
            ratios = [auto.makespan_s / everything.makespan_s for everything, auto in pairs]
            table.add_row(
                str(per_server),
                f"{kv_tokens:,}",
                f"{geometric_mean(ratios):.2f}",
                ", ".join(f"{ratio:.2f}" for ratio in ratios),
                f"{sum(prefix_hits(everything) for everything, _ in pairs) / len(pairs):.0%}",
                f"{sum(prefix_hits(auto) for _, auto in pairs) / len(pairs):.0%}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()

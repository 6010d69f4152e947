"""Makespans of a simulated cluster with `rollout.max_concurrent: auto`, relative to no limit.

    python benchmarks/bench_admission.py [--seeds 2]

Two simulated servers with 64 slots each. The size of the KV cache and the number of trajectories vary. Only engines and
tools are simulated; the agent loops and the pool are real. A row takes about ten seconds.
"""

from __future__ import annotations

import argparse
from statistics import geometric_mean

from rich.console import Console
from rich.table import Table
from simulation.cluster import SimulatedCluster, simulate
from simulation.engine import EngineModel
from simulation.report import SimulationOutcome
from simulation.workload import Workload

NUM_SERVERS = 2
SETTINGS = (
    (800, (60_000, 100_000, 200_000, 400_000, 2_400_000)),
    (200, (100_000, 200_000, 400_000, 800_000)),
)
"""Trajectories per server, and capacities of a server's KV cache in tokens."""


def prefix_hits(outcome: SimulationOutcome) -> float:
    """Return the share of previously seen prompt tokens that were still in the server's KV cache."""
    known = sum(ended.num_known_tokens for ended in outcome.ended)
    return sum(ended.num_cached_tokens for ended in outcome.ended) / known


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2)
    seeds = range(parser.parse_args().seeds)
    table = Table("per server", "KV cache", "auto to no limit", "each seed", "prefix hits", "with auto")
    for per_server, sizes in SETTINGS:
        workloads = [Workload(num_trajectories=NUM_SERVERS * per_server, seed=seed).plans() for seed in seeds]
        for kv_tokens in sizes:
            cluster = SimulatedCluster(num_servers=NUM_SERVERS, model=EngineModel(kv_tokens=kv_tokens))
            adapting = SimulatedCluster(num_servers=NUM_SERVERS, model=cluster.model, max_concurrent="auto")
            pairs = [(simulate(cluster, plans), simulate(adapting, plans)) for plans in workloads]
            ratios = [auto.makespan_s / unlimited.makespan_s for unlimited, auto in pairs]
            table.add_row(
                str(per_server),
                f"{kv_tokens:,}",
                f"{geometric_mean(ratios):.2f}",
                ", ".join(f"{ratio:.2f}" for ratio in ratios),
                f"{sum(prefix_hits(unlimited) for unlimited, _ in pairs) / len(pairs):.0%}",
                f"{sum(prefix_hits(auto) for _, auto in pairs) / len(pairs):.0%}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()

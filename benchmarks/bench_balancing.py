"""Makespans of a simulated cluster under several policies, relative to a perfect pool.

    python benchmarks/bench_balancing.py [--servers 32] [--trajectories 3000] [--seed 0] [--json FILE]

The perfect pool is one server with the capacity of all servers. Engines and tools are simulated, so that the figures
depend only on the seed; the agent loops and the pool are real. The large setting of docs/performance.md is
`--servers 512 --trajectories 100000`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from simulation.cluster import PolicyName, SimulatedCluster, simulate
from simulation.report import MakespanBounds, SimulationReport
from simulation.workload import Workload

SLOW_SHARES = (0.0, 0.1)
TARGETS = {0.0: 1.05, 0.1: 1.30}
"""Largest accepted makespan of the default policy relative to the perfect pool, by share of slow servers."""


def clusters(base: SimulatedCluster) -> Iterator[tuple[str, SimulatedCluster]]:
    """Yield the names and settings of the compared clusters."""
    for policy in PolicyName:
        yield policy, replace(base, policy=policy)


def measure(num_servers: int, workload: Workload) -> Iterator[dict[str, Any]]:
    """Yield one row of results per cluster."""
    plans = workload.plans()
    for slow_share in SLOW_SHARES:
        base = SimulatedCluster(num_servers=num_servers, slow_share=slow_share)
        bounds = MakespanBounds.of(plans, model=base.model, capacity=base.capacity)
        perfect_s = simulate(base.perfect(), plans).makespan_s
        for name, cluster in clusters(base):
            report = SimulationReport.of(simulate(cluster, plans), bounds=bounds, perfect_s=perfect_s)
            yield {"slow_share": slow_share, "name": name, **report.as_dict()}


def main() -> None:
    """Measure and print the table, and exit with 1 if the default policy misses a target."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", type=int, default=32)
    parser.add_argument("--trajectories", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    console = Console()
    workload = Workload(num_trajectories=arguments.trajectories, seed=arguments.seed)
    table = Table("slow servers", "policy", "makespan to perfect", "to bound", "p50", "p99", "prefix hits")
    rows: list[dict[str, Any]] = []
    for row in measure(arguments.servers, workload):
        rows.append(row)
        console.print(f"{row['slow_share']:.0%} slow, {row['name']}: {row['to_perfect']:.3f}")
        latency = row["latency_s"]
        table.add_row(
            f"{row['slow_share']:.0%}",
            row["name"],
            f"{row['to_perfect']:.3f}",
            f"{row['to_bound']:.3f}",
            f"{latency['p50']:.0f} s",
            f"{latency['p99']:.0f} s",
            f"{row['prefix_hit_rate']:.1%}",
        )
    console.print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2), encoding="utf-8")
    ours = {row["slow_share"]: row["to_perfect"] for row in rows if row["name"] == PolicyName.LEAST_WORK}
    for share, limit in TARGETS.items():
        result = "reached" if ours[share] <= limit else "missed"
        console.print(f"{share:.0%} slow: {ours[share]:.3f}, target {limit:.2f}: {result}")
    raise SystemExit(any(ours[share] > limit for share, limit in TARGETS.items()))


if __name__ == "__main__":
    main()

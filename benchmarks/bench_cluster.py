"""CPU time on a Ray cluster, relative to one process.

    python benchmarks/bench_cluster.py [--rows 400]

Needs `pip install "agent-loop[ray]"`. Servers are scripted. CPU time includes all child processes and Ray's own
processes. The ratios are more reliable than the absolute times.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import ray
from overhead.processes import tree_cpu_seconds
from rich.console import Console
from rich.table import Table

from agent_loop.config import Config
from agent_loop.distributed import create_manager
from agent_loop.rollout.manager import AgentLoopManager
from tests.distributed.project import make_config as make_project_config
from tests.distributed.project import make_project, rows


@dataclass(frozen=True)
class Cost:
    cpu_ms: float
    wall_ms: float


async def measure_manager(config: Config, *, num_rows: int) -> Cost:
    """Return the CPU and wall time per trajectory."""
    manager: AgentLoopManager = create_manager(config)
    async with manager:
        await manager.run(rows(num_rows))
        cpu, wall = tree_cpu_seconds(), time.perf_counter()
        await manager.run(rows(num_rows))
        return Cost(
            1000 * (tree_cpu_seconds() - cpu) / num_rows, 1000 * (time.perf_counter() - wall) / num_rows
        )


def trajectories_table(folder: Path, *, num_rows: int) -> Table:
    local = asyncio.run(
        measure_manager(make_project_config(folder, runtime="local", script="answer"), num_rows=num_rows)
    )
    on_ray = asyncio.run(measure_manager(make_project_config(folder, script="answer"), num_rows=num_rows))
    table = Table(
        "runtime", "CPU ms per trajectory", "wall ms", "ratio of CPU", title="Tool loop, 4 assistant turns"
    )
    for name, cost in (("local", local), ("ray", on_ray)):
        table.add_row(name, f"{cost.cpu_ms:.2f}", f"{cost.wall_ms:.2f}", f"{cost.cpu_ms / local.cpu_ms:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=400)
    arguments = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    console = Console()
    with tempfile.TemporaryDirectory() as name:
        folder = make_project(Path(name))
        ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False)
        try:
            console.print(trajectories_table(folder, num_rows=arguments.rows))
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()

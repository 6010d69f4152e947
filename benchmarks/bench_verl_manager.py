"""CPU time of a trajectory without the model in verl's trainer: verl's agent loop manager and `VerlAgentLoopManager`.

    ../.venv-verl/bin/python bench_verl_manager.py [--quick] [--rounds N] [--scenario NAME ...] [--batch N]

Needs an interpreter with verl (`install_verl.sh`) and this package. Both managers get the same configuration of verl,
the same client, balancer and server actors, and the same rows, on one Ray cluster with one worker each. V0 returns a
`DataProto`; V1, verl's default, writes to TransferQueue. CPU time includes the driver and all actors. Only the engine
is a stub. Prompts, responses, masks and log-probs must agree before a time is printed, and their digest is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import ray
from outcome import conclude
from overhead.processes import tree_cpu_seconds
from overhead.shapes import Shape, Workload
from overhead.verl_managers import PATHS, ManagedWorkload, start_cluster
from overhead.workload import make_workloads
from rich.console import Console
from rich.table import Table

SHAPES = (
    Shape("short", 472, 3, 100, 78, 512, 512),
    Shape("long", 2272, 10, 500, 78, 2304, 6144, num_conversations=16),
    Shape("heavy-tailed", 472, 10, 300, 78, 512, 6144, num_conversations=32),
)
HEAVY_TAILED = "heavy-tailed"
"""Scenario whose numbers of turns, and lengths of turns, have a Pareto distribution."""
TARGETS = {"V0": 2.0, "V1": 2.5}
"""Least accepted ratio of verl's CPU time to ours, by path."""


@dataclass(frozen=True, slots=True)
class Result:
    """Medians of one scenario and path, per trajectory."""

    scenario: str
    path: str
    verl_ms: float
    ours_ms: float
    ratio: float
    digest: str


def heavy_tailed(shape: Shape, *, seed: int = 0) -> list[Shape]:
    """Return the shape of each conversation."""
    draw = random.Random(seed)
    return [
        dataclasses.replace(
            shape,
            num_turns=min(shape.num_turns, 2 + int(draw.paretovariate(1.2))),
            turn_tokens=min(shape.turn_tokens, int(60 * draw.paretovariate(1.2))),
        )
        for _ in range(shape.num_conversations)
    ]


def compare(shape: Shape, folder: Path, *, num_rounds: int, batch_size: int) -> list[Result]:
    """Run both managers on both paths alternately.

    Raises:
        SystemExit: The managers return different tokens, masks or log-probs.
    """
    workload = ManagedWorkload(Workload.read(folder, shape.name), folder=folder)
    num_copies = max(1, batch_size // shape.num_conversations)
    num_trajectories = num_copies * shape.num_conversations
    results: list[Result] = []
    for path in PATHS:
        times: dict[str, list[float]] = {"verl": [], "ours": []}
        digests = {
            name: workload.columns(path, workload.run(path, name)).digest() for name in times
        }  # (also warms up)
        if len(set(digests.values())) > 1:
            raise SystemExit(f"{shape.name}, {path}: the managers return different batches: {digests}")
        for number in range(num_rounds):
            for name in ("verl", "ours") if number % 2 else ("ours", "verl"):
                gc.collect()
                start = tree_cpu_seconds()
                workload.run(path, name, num_copies=num_copies)
                times[name].append((tree_cpu_seconds() - start) / num_trajectories * 1e3)
                workload.close()
        verl_ms, ours_ms = (statistics.median(times[name]) for name in ("verl", "ours"))
        results.append(Result(shape.name, path, verl_ms, ours_ms, verl_ms / ours_ms, digests["ours"][:12]))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round; missed targets are only printed")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--batch", type=int, default=512, metavar="N", help="trajectories in a batch")
    parser.add_argument("--scenario", action="append", choices=[shape.name for shape in SHAPES])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    options = parser.parse_args()
    shapes = [shape for shape in SHAPES if options.scenario is None or shape.name in options.scenario]
    variants = {shape.name: heavy_tailed(shape) for shape in shapes if shape.name == HEAVY_TAILED}
    start = time.monotonic()
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_workloads(folder, shapes=shapes, variants=variants)
        start_cluster(num_cpus=8 * len(shapes))
        for shape in shapes:
            num_rounds = 1 if options.quick else options.rounds
            results += compare(shape, folder, num_rounds=num_rounds, batch_size=options.batch)
        ray.shutdown()
    table = Table("scenario", "path", "verl, ms", "ours, ms", "verl to ours", "digest of both")
    for result in results:
        table.add_row(
            result.scenario,
            result.path,
            f"{result.verl_ms:.1f}",
            f"{result.ours_ms:.1f}",
            f"{result.ratio:.1f}",
            result.digest,
        )
    console = Console()
    console.print(table)
    console.print(
        f"CPU time per trajectory; batches of {options.batch}; {time.monotonic() - start:.0f} s in all"
    )
    missed = [
        f"{result.scenario}, {result.path}: {result.ratio:.2f}, target {TARGETS[result.path]}"
        for result in results
        if result.ratio < TARGETS[result.path]
    ]
    conclude(results, missed=missed, json_file=options.json, is_quick=options.quick)


if __name__ == "__main__":
    main()

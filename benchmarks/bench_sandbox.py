"""Overhead of sandboxes: many concurrent trajectories, each with its own sandbox and three calls.

    python benchmarks/bench_sandbox.py [--quick] [--python /usr/bin/python3]

The floor is a bare `python -c` for each call, without isolation and without state between calls. Rounds alternate
between the two, so that other load on the machine affects both.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agent_loop.tools.sandbox.sandbox import open_sandbox
from agent_loop.tools.sandbox.settings import SandboxSettings

NUM_CALLS = 3
CODE = "x = sum(n * n for n in range(100))\nprint(x)"
TARGET = 1.5


@dataclass
class Round:
    """Times of one round in seconds."""

    wall: float = 0.0
    opens: list[float] = field(default_factory=list[float])
    calls: list[float] = field(default_factory=list[float])
    closes: list[float] = field(default_factory=list[float])
    memory_mb: float = 0.0


async def run_sandboxes(settings: SandboxSettings, number: int) -> Round:
    """Run all sandboxes concurrently. All are open before the first one closes."""
    taken = Round()
    started = time.perf_counter()

    async def converse() -> None:
        clock = time.perf_counter()
        sandbox = await open_sandbox(settings)
        taken.opens.append(time.perf_counter() - clock)
        for _ in range(NUM_CALLS):
            clock = time.perf_counter()
            reply = await sandbox.run(CODE)
            taken.calls.append(time.perf_counter() - clock)
            assert reply.ending == "done", reply
        if len(taken.calls) == number * NUM_CALLS:
            all_called.set()
        await weighed.wait()
        clock = time.perf_counter()
        await sandbox.close()
        taken.closes.append(time.perf_counter() - clock)

    all_called, weighed = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for _ in range(number):
            group.create_task(converse())
        await all_called.wait()
        clock = time.perf_counter()
        taken.memory_mb = memory_below_mb(os.getpid()) / number
        weighing_s = time.perf_counter() - clock
        weighed.set()
    taken.wall = time.perf_counter() - started - weighing_s
    return taken


async def run_bare(python: str, number: int) -> Round:
    """Run a process for each call, with as many concurrent processes as there are processors."""
    taken = Round()
    started = time.perf_counter()
    slots = asyncio.Semaphore(os.cpu_count() or 1)

    async def converse() -> None:
        for _ in range(NUM_CALLS):
            async with slots:
                clock = time.perf_counter()
                process = await asyncio.create_subprocess_exec(
                    python, "-c", CODE, stdout=asyncio.subprocess.PIPE
                )
                await process.communicate()
                taken.calls.append(time.perf_counter() - clock)

    async with asyncio.TaskGroup() as group:
        for _ in range(number):
            group.create_task(converse())
    taken.wall = time.perf_counter() - started
    return taken


def memory_below_mb(root: int) -> float:
    """Return the memory of all descendants of a process, with shared pages divided among their processes (PSS)."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    below, total = {root}, 0
    while new := {pid for pid, parent in parents.items() if parent in below and pid not in below}:
        below |= new
    for pid in below - {root}:
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            return float("nan")  # reading the memory of the supervisors needs privileges
        total += int(rollup.partition("\nPss:")[2].split()[0])
    return total / 1024


def percentiles(values: Iterable[float]) -> str:
    ordered = sorted(values)
    return f"{ordered[len(ordered) // 2] * 1e3:.1f} / {ordered[int(len(ordered) * 0.95)] * 1e3:.1f}"


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="32 sandboxes; the target is not enforced")
    parser.add_argument(
        "--python", default=SandboxSettings().resolve_python(), help="interpreter of both sides"
    )
    options = parser.parse_args()
    number, rounds = (32, 1) if options.quick else (256, 3)
    settings = SandboxSettings(python=options.python)
    pairs = [
        (await run_bare(options.python, number), await run_sandboxes(settings, number)) for _ in range(rounds)
    ]

    bare, sandboxed = ([pair[index] for pair in pairs] for index in (0, 1))
    table = Table(title=f"{number} trajectories of {NUM_CALLS} calls")
    for column in ("", "bare processes", "sandboxes"):
        table.add_column(column, justify="right")

    def row(name: str, *cells: str) -> None:
        table.add_row(name, *cells)

    row(
        "trajectories/s",
        *(f"{statistics.median(number / r.wall for r in side):.1f}" for side in (bare, sandboxed)),
    )
    row(
        "calls/s",
        *(
            f"{statistics.median(NUM_CALLS * number / r.wall for r in side):.1f}"
            for side in (bare, sandboxed)
        ),
    )
    row("start, ms p50 / p95", "-", percentiles(time for r in sandboxed for time in r.opens))
    row(
        "call, ms p50 / p95",
        *(percentiles(time for r in side for time in r.calls) for side in (bare, sandboxed)),
    )
    row("end, ms p50 / p95", "-", percentiles(time for r in sandboxed for time in r.closes))
    row("memory each, MB", "-", f"{statistics.median(r.memory_mb for r in sandboxed):.1f}")
    console = Console(width=100)
    console.print(table)
    ratio = statistics.median(sandbox.wall / process.wall for process, sandbox in pairs)
    console.print(f"{ratio:.2f} of the time of bare processes (target: at most {TARGET})")
    if ratio > TARGET and not options.quick:
        raise SystemExit(1)


if __name__ == "__main__":
    asyncio.run(main())

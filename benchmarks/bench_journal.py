"""CPU time per trajectory with and without the journal, on servers without latency.

    python benchmarks/bench_journal.py [--quick]

A trajectory has three turns with a tool call, and an answer. All of the time is spent in the loop: on templates,
tokens, parsing, tools and records. Rounds with and without the journal alternate. The table shows medians.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from rich.console import Console
from rich.table import Table
from scripted_rollouts import NUM_CALLS, NUM_ROWS, ScriptedRollouts, lookup, measure_alternating, median_ratio

from agent_loop.episode.limits import EpisodeLimits
from agent_loop.loops.base import LoopContext
from agent_loop.loops.registry import LoopRegistry
from agent_loop.loops.tool_agent import ToolAgentLoop
from agent_loop.rollout.jobs import Job
from agent_loop.rollout.journal import StepKey, open_journal
from agent_loop.rollout.worker import AgentLoopWorker
from agent_loop.servers.manager import AsyncLLMServerManager

assert ToolAgentLoop

TARGET = 1.10
"""Largest accepted ratio of the CPU times."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Times of one rollout in seconds."""

    cpu: float
    wall: float


async def roll_out(rollouts: ScriptedRollouts, path: Path | None) -> Cost:
    """Run one rollout, with a journal at `path`, or without a journal."""
    worker = AgentLoopWorker(
        LoopContext(
            server_manager=AsyncLLMServerManager([rollouts.server()]),
            template=rollouts.template,
            limits=EpisodeLimits(prompt_length=4096, response_length=8192),
            tools={"lookup": lookup},
        ),
        loops=LoopRegistry(),
        default_agent_loop="tool_agent",
    )
    jobs: Sequence[Job] = [Job(row, group, 0, {}) for group, row in enumerate(rollouts.rows)]
    cpu, wall = time.process_time(), time.perf_counter()
    if path is None:
        await worker.run(jobs)
    else:
        key = StepKey.of(rollouts.rows, step=1, weight_version=0, num_samples=1, settings={})
        async with open_journal(path, key=key, rows=rollouts.rows, resume=False) as journal:
            trajectories = await worker.run(journal.divide(jobs)[1])
            await journal.complete(trajectories)
    return Cost(time.process_time() - cpu, time.perf_counter() - wall)


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three rounds; the target is not enforced")
    options = parser.parse_args()
    rollouts, num_rounds = ScriptedRollouts(), 3 if options.quick else 15
    await roll_out(rollouts, None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        pairs = await measure_alternating(
            lambda: roll_out(rollouts, None), lambda: roll_out(rollouts, path), num_rounds=num_rounds
        )
        num_bytes = path.stat().st_size
    table = Table(title=f"{NUM_ROWS} trajectories of {NUM_CALLS + 1} turns")
    for column in ("", "without, ms per trajectory", "with, ms per trajectory", "ratio (median of pairs)"):
        table.add_column(column, justify="right")
    for name in ("cpu", "wall"):
        part = attrgetter(name)
        of_off, of_on = (
            statistics.median(map(part, side)) / NUM_ROWS * 1e3 for side in zip(*pairs, strict=True)
        )
        table.add_row(name, f"{of_off:.3f}", f"{of_on:.3f}", f"{median_ratio(pairs, part):.3f}")
    console = Console(width=120)
    console.print(table)
    console.print(f"{num_bytes / NUM_ROWS:.0f} bytes per trajectory")
    cpu = median_ratio(pairs, attrgetter("cpu"))
    if cpu > TARGET and not options.quick:
        console.print(f"missed: {cpu:.3f} times the CPU time without the journal, above {TARGET}")
        raise SystemExit(1)


if __name__ == "__main__":
    asyncio.run(main())

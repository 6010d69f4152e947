"""Peak memory of a rollout per trajectory, relative to the size of its results.

    python benchmarks/bench_memory.py [--quick] [--json FILE]

All trajectories run concurrently, and their batch is created at the end. The results are the tensors of the batch and
the text of the conversations. Memory is what Python and numpy allocated, as `tracemalloc` reports it; the batch's
tensors use memory of numpy.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import tempfile
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from outcome import conclude
from overhead.ours import ENCODERS, LookupServer, OurRunner, load_template
from overhead.shapes import SHAPES, Workload
from overhead.workload import make_workloads
from rich.console import Console
from rich.table import Table

from agent_loop.rollout.batch import assemble
from agent_loop.trajectory import Trajectory
from agent_loop.types import TokenOutput

SHORT, LONG = SHAPES[:2]
SAMPLES = {SHORT.name: 8, LONG.name: 4}
"""Trajectories per conversation."""
TARGET = 1.3


@dataclass(frozen=True, slots=True)
class Result:
    """Sizes in bytes per trajectory."""

    scenario: str
    num_in_flight: int
    tensors: float
    text: float
    in_flight: float
    """Memory at the end of the first trajectory."""
    peak: float

    @property
    def ratio(self) -> float:
        return self.peak / (self.tensors + self.text)


class WaitingServer(LookupServer):
    """Server with a short delay, so that all trajectories begin before the first one ends."""

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        await asyncio.sleep(0.01)
        return await super().generate(*args, **kwargs)


async def measure(workload: Workload, *, template: Any, num_samples: int) -> Result:
    runner = OurRunner(workload, template=template, server=WaitingServer(workload))
    tracemalloc.start()
    await runner.manager.run(runner.rows, n=num_samples)  # fills the caches
    gc.collect()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    in_flight: list[int] = []

    def note(_: Trajectory) -> None:
        if not in_flight:
            in_flight.append(tracemalloc.get_traced_memory()[0] - before)

    trajectories = await runner.manager.run(runner.rows, n=num_samples, on_trajectory=note)
    batch = assemble(trajectories, pad_token_id=template.pad_token_id)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    columns = [column for column in batch.values() if isinstance(column, torch.Tensor)]
    tensors = sum(column.numel() * column.element_size() for column in columns)
    text = sum(len(str(m["content"]).encode()) for t in trajectories for m in t.output.messages)
    num = len(trajectories)
    return Result(workload.shape.name, num, tensors / num, text / num, in_flight[0] / num, peak / num)


def print_table(results: Sequence[Result]) -> None:
    table = Table(title="Memory of a trajectory, kB")
    table.add_column("scenario")
    for column in ("in flight", "tensors", "text", "while it runs", "peak", "peak to tensors and text"):
        table.add_column(column, justify="right")
    for result in results:
        sizes = (result.tensors, result.text, result.in_flight, result.peak)
        table.add_row(
            result.scenario,
            f"{result.num_in_flight:,}",
            *(f"{size / 1e3:.1f}" for size in sizes),
            f"{result.ratio:.2f}",
        )
    Console(width=120).print(table)


def missed_targets(results: Sequence[Result]) -> list[str]:
    return [
        f"{result.scenario}: {result.ratio:.2f}, above {TARGET}"
        for result in results
        if result.ratio > TARGET
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short trajectories; the target is not enforced")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    options = parser.parse_args()
    results: list[Result] = []
    shapes = [SHORT] if options.quick else [SHORT, LONG]
    with tempfile.TemporaryDirectory() as folder:
        make_workloads(Path(folder), shapes=shapes)
        template = load_template(Path(folder), encoder=ENCODERS[0])
        for shape in shapes:
            workload = Workload.read(Path(folder), shape.name)
            results.append(asyncio.run(measure(workload, template=template, num_samples=SAMPLES[shape.name])))
    print_table(results)
    conclude(results, missed=missed_targets(results), json_file=options.json, is_quick=options.quick)


if __name__ == "__main__":
    main()

"""Duration of a rollout with heavy-tailed latencies, relative to its longest trajectory.

    python benchmarks/bench_makespan.py [--quick] [--json FILE]

All trajectories run concurrently in one process. The latencies of completions follow a Pareto distribution, scaled so
that the trajectory with the largest sum waits 1.6 s. No rollout can take less, and a rollout without computation would
take exactly as long. Efficiency is this bound divided by the measured time. The floor only encodes, in plain asyncio
tasks, with the same encoder and the same latencies. Trajectories are the `short` ones of `bench_overhead.py`.

Time is the CPU time of this process plus its idle time, which is skipped. It is the time on a dedicated core, and does
not depend on other load on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import selectors
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcome import conclude
from overhead.floor import FloorRunner
from overhead.ours import ENCODERS, LookupServer, OurRunner, load_template
from overhead.shapes import SHAPES, Turn, Workload
from overhead.workload import make_workloads
from rich.console import Console
from rich.table import Table

from agent_loop.types import TokenOutput

SHAPE = SHAPES[0]
IN_FLIGHT = (64, 512, 2048, 8192)
QUICK_IN_FLIGHT = (64, 512, 2048)
TARGETS = {512: 0.85, 2048: 0.60}
"""Efficiency with tiktoken."""
BOUND_S = 1.6
TAIL_INDEX = 1.5
"""Index of the Pareto distribution. A smaller index has a heavier tail."""


@dataclass(frozen=True, slots=True)
class Result:
    """Medians of one side with one number of concurrent trajectories."""

    side: str
    encoder: str
    num_in_flight: int
    makespan_s: float
    cpu_s: float

    @property
    def efficiency(self) -> float:
        return BOUND_S / self.makespan_s


def latencies(num_trajectories: int, *, seed: int = 0) -> list[list[float]]:
    """Return the latency of each completion of each trajectory, in seconds."""
    chance = random.Random(seed)
    drawn = [
        [chance.paretovariate(TAIL_INDEX) for _ in range(SHAPE.num_turns)] for _ in range(num_trajectories)
    ]
    scale = BOUND_S / max(map(sum, drawn))
    return [[scale * seconds for seconds in trajectory] for trajectory in drawn]


class SlowServer(LookupServer):
    """Server with given latencies. Sessions are numbered in the order of their first requests."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._sessions: dict[str, list[float]] = {}
        self.latencies = iter([[0.0]])

    async def generate(
        self, prompt_ids: Any, sampling_params: Any, request_id: str, **more: Any
    ) -> TokenOutput:
        remaining = self._sessions.get(request_id)
        if remaining is None:
            remaining = self._sessions[request_id] = next(self.latencies)[::-1]
        await asyncio.sleep(remaining.pop())
        return await super().generate(prompt_ids, sampling_params, request_id, **more)

    def end_session(self, request_id: str) -> None:
        del self._sessions[request_id]


class SlowFloor(FloorRunner):
    """Floor with the same latencies."""

    latencies: Sequence[Sequence[float]] = ()

    async def answer(self, tail: tuple[int, ...], *, number: int, num_turns_done: int) -> Turn:
        await asyncio.sleep(self.latencies[number][num_turns_done])
        return await super().answer(tail, number=number, num_turns_done=num_turns_done)


async def run_ours(workload: Workload, template: Any, num_in_flight: int) -> None:
    server = SlowServer(workload)
    runner = OurRunner(workload, template=template, server=server)
    server.latencies = iter(latencies(num_in_flight))
    await runner.manager.run(runner.rows, n=num_in_flight // len(runner.rows))


async def run_floor(workload: Workload, template: Any, num_in_flight: int) -> None:
    floor = SlowFloor(workload, template=template)
    floor.latencies = latencies(num_in_flight)
    async with asyncio.TaskGroup() as group:
        for number in range(num_in_flight):
            conversation = workload.conversations[number % len(workload.conversations)]
            group.create_task(floor.converse(conversation, number=number))


RUNS = {"ours": run_ours, "floor": run_floor}


class CoreLoop(asyncio.SelectorEventLoop):
    """Event loop with a clock of CPU time that skips idle time."""

    def __init__(self) -> None:
        self.skipped_s = 0.0
        super().__init__(_SkippingSelector(self))

    def time(self) -> float:
        return time.process_time() + self.skipped_s


class _SkippingSelector(selectors.DefaultSelector):
    def __init__(self, loop: CoreLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(None if timeout is None else 0)
        if not ready and timeout is not None:
            self._loop.skipped_s += max(timeout, 0.0)
        return ready


def measure(
    workload: Workload, *, encoder: str, template: Any, num_in_flight: int, num_rounds: int
) -> list[Result]:
    """Return the medians of each side, with alternating rounds."""
    taken: dict[str, list[tuple[float, float]]] = {side: [] for side in RUNS}
    for _ in range(num_rounds):
        for side, run in RUNS.items():
            with asyncio.Runner(loop_factory=CoreLoop) as runner:
                clock = runner.get_loop().time
                began, cpu = clock(), time.process_time()
                runner.run(run(workload, template, num_in_flight))
                taken[side].append((clock() - began, time.process_time() - cpu))
    return [
        Result(
            side,
            encoder,
            num_in_flight,
            makespan_s=statistics.median(makespan for makespan, _ in of_side),
            cpu_s=statistics.median(cpu for _, cpu in of_side),
        )
        for side, of_side in taken.items()
    ]


def print_table(results: Sequence[Result]) -> None:
    table = Table(title=f"Makespans; the longest trajectory waits {BOUND_S} s")
    for column in ("in flight", "encoder", "side"):
        table.add_column(column)
    for column in ("makespan, s", "CPU, s", "efficiency"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            f"{result.num_in_flight:,}",
            result.encoder,
            result.side,
            f"{result.makespan_s:.2f}",
            f"{result.cpu_s:.2f}",
            f"{result.efficiency:.2f}",
        )
    Console(width=120).print(table)


def missed_targets(results: Sequence[Result]) -> list[str]:
    return [
        f"{result.num_in_flight} in flight: efficiency {result.efficiency:.2f}, below {TARGETS[result.num_in_flight]}"
        for result in results
        if result.side == "ours"
        and result.encoder == ENCODERS[0]
        and result.efficiency < TARGETS.get(result.num_in_flight, 0)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="at most 2048 trajectories, one round; targets are not enforced"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    options = parser.parse_args()
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        make_workloads(Path(folder), shapes=[SHAPE])
        workload = Workload.read(Path(folder), SHAPE.name)
        for encoder in ENCODERS:
            template = load_template(Path(folder), encoder=encoder)
            for num_in_flight in QUICK_IN_FLIGHT if options.quick else IN_FLIGHT:
                results += measure(
                    workload,
                    encoder=encoder,
                    template=template,
                    num_in_flight=num_in_flight,
                    num_rounds=1 if options.quick else 3,
                )
    print_table(results)
    conclude(results, missed=missed_targets(results), json_file=options.json, is_quick=options.quick)


if __name__ == "__main__":
    main()

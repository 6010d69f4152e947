"""CPU time of a trajectory without the model on Ray, compared with verl, and the speedup of a second worker.

    python benchmarks/bench_overhead_ray.py [--environment FOLDER] [--quick] [--json FILE] [--scenario NAME ...]

Needs `pip install "agent-loop[ray]"`. The method is that of `bench_overhead.py`, but each side is a Ray cluster. The
driver sends rows to one worker actor, which sends requests to one server actor, and the driver creates the batch. CPU
time includes the driver and its child processes: actors, and Ray's own processes. Only the engine in the server actor
is a stub: it returns prepared tokens without delay. Tokens, masks and log-probs of all sides must agree before a time
is printed.

The second table has batches of 512 trajectories, copies of the same rows, on one worker and on two. (With few
trajectories per worker, fewer completions share a message, so that each takes more CPU time.) First all processes share
the machine's cores, although workers, server, driver and Ray would need four. Then the workers share one core, on which
each is stopped for half of the time, and all other processes share another core. This is slower, but has the
proportions of a cluster with one core per worker. The target applies to this case.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from outcome import conclude
from overhead.options import read_options
from overhead.ours import ENCODERS
from overhead.rounds import Round, Side, measure
from overhead.shapes import SHAPES, Shape
from overhead.workload import make_workloads
from rich.console import Console
from rich.table import Table

NUM_TO_SCALE = 512
"""Number of trajectories in a batch of the second table."""
NUM_BATCHES_TO_SCALE = 2
"""Number of batches in each round of the second table."""
SHARED, HALVES = "shared by all", "half of one for each worker"
VERL = "verl"
SCENARIOS = tuple(shape for shape in SHAPES if shape.name in ("short", "long"))
TARGETS_TO_VERL: Mapping[str, float] = {"short": 4, "long": 3}
"""Least accepted ratio of verl's CPU time to ours, by scenario."""
TARGET_OF_TWO_WORKERS = 1.7
"""Least accepted speedup of two workers over one, if each has its own core or half a core."""


@dataclass(frozen=True, slots=True)
class Result:
    """Medians of one side in one scenario, per trajectory."""

    scenario: str
    side: str
    cpu_ms: float
    wall_ms: float
    verl_to_it: float | None
    """Ratio of verl's CPU time to that of this side."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """Medians of one scenario with one assignment of cores."""

    scenario: str
    cores: str
    one_worker_per_s: float
    """Trajectories per second with one worker."""
    two_workers_per_s: float
    cores_of_one: float
    """Ratio of CPU time to wall time with one worker. The other cores are free for a second worker."""
    cpu_of_two_to_one: float
    """Ratio of the CPU times per trajectory. At 1, two workers scale perfectly if there are enough cores."""

    @property
    def gain(self) -> float:
        return self.two_workers_per_s / self.one_worker_per_s


def our_command(folder: Path, encoder: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "overhead.ours_on_ray", str(folder), encoder, *options]


def compare(shape: Shape, folder: Path, *, environment: Path | None, num_rounds: int) -> list[Result]:
    """Compare our side, with one worker and each encoder, with verl."""
    commands = {f"ours, {encoder}": our_command(folder, encoder) for encoder in ENCODERS}
    if environment is not None:
        commands[VERL] = [str(environment / "bin" / "python"), "-m", "overhead.verl_on_ray", str(folder)]
    with ExitStack() as stack:
        sides = [stack.enter_context(Side(name, command)) for name, command in commands.items()]
        rounds = measure(shape, sides, num_rounds=num_rounds)
    return [
        Result(
            scenario=shape.name,
            side=name,
            cpu_ms=statistics.median(r.cpu_s for r in of_side) / shape.num_conversations * 1e3,
            wall_ms=statistics.median(r.wall_s for r in of_side) / shape.num_conversations * 1e3,
            verl_to_it=statistics.median(
                a.cpu_s / b.cpu_s for a, b in zip(rounds[VERL], of_side, strict=True)
            )
            if VERL in rounds
            else None,
        )
        for name, of_side in rounds.items()
    ]


def scale(shape: Shape, folder: Path, *, on_halves: bool, num_rounds: int) -> Scaling:
    """Measure our side with one worker and with two.

    Args:
        shape: The scenario.
        folder: Folder of the workloads.
        on_halves: Whether each worker runs on half a core.
        num_rounds: Number of rounds.
    """
    num_copies = NUM_TO_SCALE // shape.num_conversations
    options = ["--copies", str(num_copies), "--batches", str(NUM_BATCHES_TO_SCALE)]
    options += ["--halves"] if on_halves else []
    with ExitStack() as stack:
        sides = [
            stack.enter_context(
                Side(str(num), our_command(folder, ENCODERS[0], "--workers", str(num), *options))
            )
            for num in (1, 2)
        ]
        rounds = measure(shape, sides, num_rounds=num_rounds)

    def per_s(of_side: Sequence[Round]) -> float:
        return statistics.median(NUM_TO_SCALE / round.wall_s for round in of_side)

    cores = statistics.median(round.cpu_s / round.wall_s for round in rounds["1"])
    two_to_one = statistics.median(
        two.cpu_s / one.cpu_s for one, two in zip(rounds["1"], rounds["2"], strict=True)
    )
    return Scaling(
        shape.name, HALVES if on_halves else SHARED, per_s(rounds["1"]), per_s(rounds["2"]), cores, two_to_one
    )


def print_results(results: Sequence[Result], scalings: Sequence[Scaling]) -> None:
    table = Table(title="One trajectory without the model, one worker on Ray")
    for column in ("scenario", "side", "CPU, ms", "wall, ms", "verl to it"):
        table.add_column(column, justify="left" if column in ("scenario", "side") else "right")
    for result in results:
        ratio = "" if result.verl_to_it is None else f"{result.verl_to_it:.1f}"
        table.add_row(result.scenario, result.side, f"{result.cpu_ms:.2f}", f"{result.wall_ms:.2f}", ratio)
    gain = Table(title="Trajectories per second")
    for column in (
        "scenario",
        "cores",
        "one worker",
        "cores used by it",
        "two workers",
        "gain",
        "CPU of two to one",
    ):
        gain.add_column(column, justify="left" if column in ("scenario", "cores") else "right")
    for scaling in scalings:
        gain.add_row(
            scaling.scenario,
            scaling.cores,
            f"{scaling.one_worker_per_s:.0f}",
            f"{scaling.cores_of_one:.2f}",
            f"{scaling.two_workers_per_s:.0f}",
            f"{scaling.gain:.2f}",
            f"{scaling.cpu_of_two_to_one:.2f}",
        )
    for each in (table, gain):
        Console(width=120).print(each)


def missed_targets(results: Sequence[Result], scalings: Sequence[Scaling]) -> list[str]:
    missed: list[str] = []
    for result in results:
        wanted = TARGETS_TO_VERL[result.scenario]
        if result.side != VERL and result.verl_to_it is not None and result.verl_to_it < wanted:
            missed.append(
                f"{result.scenario}, {result.side}: verl takes {result.verl_to_it:.1f} times as long, below {wanted}"
            )
    missed += [
        f"{scaling.scenario}, {scaling.cores}: two workers do {scaling.gain:.2f} times what one does, below "
        f"{TARGET_OF_TWO_WORKERS}"
        for scaling in scalings
        if scaling.cores != SHARED and scaling.gain < TARGET_OF_TWO_WORKERS
    ]
    return missed


def main() -> None:
    options = read_options(__doc__, shapes=SCENARIOS)
    results: list[Result] = []
    scalings: list[Scaling] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_workloads(folder, shapes=options.shapes)
        for shape in options.shapes:
            results += compare(shape, folder, environment=options.environment, num_rounds=options.num_rounds)
            scalings += [
                scale(shape, folder, on_halves=on_halves, num_rounds=options.num_rounds)
                for on_halves in (False, True)
            ]
    print_results(results, scalings)
    conclude(
        [*results, *scalings],
        missed=missed_targets(results, scalings),
        json_file=options.json_file,
        is_quick=options.is_quick,
    )


if __name__ == "__main__":
    main()

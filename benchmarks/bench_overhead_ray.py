"""What a trajectory costs beside the model under Ray: CPU time against verl's manager, and a second worker's gain.

    python benchmarks/bench_overhead_ray.py [--environment FOLDER] [--quick] [--json FILE] [--scenario NAME ...]

Needs `pip install "agent-loop[ray]"`. As `bench_overhead.py`, but each side is a Ray cluster: rows go from the driver
to one worker actor, which asks one server actor; the driver makes the batch. CPU time is that of the driver and of
everything below it: actors, and Ray's own processes. Only the engine in the server actor is faked: it answers at once
with tokens that were made before. Tokens, masks and log-probs of all sides must agree before a time is printed.

The second table has batches of 512 trajectories, the same rows again and again, on one worker and on two. (With few
trajectories per worker fewer completions share a message, so that each takes more CPU time, on however many workers.)
First all processes share the machine's cores, of which workers, server, driver and Ray would need four. Then the
workers share one core, on which each is held for half of the time, and all else has another one: slower, but in the
proportions of a cluster, where each worker has a core of its own. The aim is for that.
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
"""Trajectories in a batch that one worker or two run."""
NUM_BATCHES_TO_SCALE = 2
"""In each round."""
SHARED, HALVES = "shared by all", "half of one for each worker"
VERL = "verl"
SCENARIOS = tuple(shape for shape in SHAPES if shape.name in ("short", "long"))
TARGETS_TO_VERL: Mapping[str, float] = {"short": 4, "long": 3}
"""verl's CPU time is to be at least so many times ours."""
TARGET_OF_TWO_WORKERS = 1.7
"""They are to do at least so many times what one does, where each has a core, or half of one, of its own."""


@dataclass(frozen=True, slots=True)
class Result:
    """Medians of one side in one scenario, per trajectory."""

    scenario: str
    side: str
    cpu_ms: float
    wall_ms: float
    verl_to_it: float | None
    """CPU time."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """Medians of one scenario, with the cores shared out in one way."""

    scenario: str
    cores: str
    one_worker_per_s: float
    """Trajectories."""
    two_workers_per_s: float
    cores_of_one: float
    """CPU time to time, with one worker. What it leaves free of the machine is what a second worker has."""
    cpu_of_two_to_one: float
    """CPU time per trajectory. Where it is 1 and no other process is at its limit, workers lack nothing but cores."""

    @property
    def gain(self) -> float:
        return self.two_workers_per_s / self.one_worker_per_s


def our_command(folder: Path, encoder: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "overhead.ours_on_ray", str(folder), encoder, *options]


def compare(shape: Shape, folder: Path, *, environment: Path | None, num_rounds: int) -> list[Result]:
    """Ours with one worker, with each encoder, and verl's."""
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
    """Ours with one worker and with two."""
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
    table = Table(title="One trajectory beside the model, one worker under Ray")
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
        "cores that it takes",
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

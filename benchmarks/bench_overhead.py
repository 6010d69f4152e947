"""CPU time of a trajectory without the model, compared with verl's loop and with a loop written by hand.

    python benchmarks/bench_overhead.py [--environment FOLDER] [--quick] [--json FILE] [--scenario NAME ...]

Only the model is a stub: it returns prepared tokens without delay. All sides receive the same prompts, completions and
tool results, and must return the same padded prompts, responses, masks and log-probs. The benchmark compares them
before it prints times. Each side runs in its own process, which measures its CPU time. Rounds alternate, and the table
shows medians. `--environment` is the folder of an environment with verl, which is installed if it is missing (3 GB).
Without it, verl is omitted.
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

VERL = "verl"
TARGETS_TO_VERL: Mapping[tuple[str, str], float] = {
    ("short", "tiktoken"): 6,
    ("long", "tiktoken"): 6,
    ("wide", "tiktoken"): 8,
    ("short", "tokenizers"): 4,
    ("long", "tokenizers"): 4,
}
"""Least accepted ratio of verl's CPU time to ours, by scenario and encoder."""
TARGET_TO_FLOOR = 5.0
"""Largest accepted ratio of our CPU time to the floor's, with the same encoder."""


@dataclass(frozen=True, slots=True)
class Result:
    """Medians of one side in one scenario, per trajectory."""

    scenario: str
    side: str
    encoder: str
    cpu_ms: float
    wall_ms: float
    verl_to_it: float | None
    it_to_floor: float | None
    """Ratio of the CPU time to that of the floor with the same encoder."""


def commands(folder: Path, *, environment: Path | None) -> dict[str, list[str]]:
    """Return the command line of each side by its name."""
    started = {
        f"{side}, {encoder}": [sys.executable, "-m", f"overhead.{side}", str(folder), encoder]
        for side in ("ours", "floor")
        for encoder in ENCODERS
    }
    if environment is not None:
        started[VERL] = [str(environment / "bin" / "python"), "-m", "overhead.verl_side", str(folder)]
    return started


def results_of(shape: Shape, rounds: Mapping[str, Sequence[Round]]) -> list[Result]:
    def ratio(of: str, to: str) -> float | None:
        if of not in rounds or to not in rounds:
            return None
        return statistics.median(a.cpu_s / b.cpu_s for a, b in zip(rounds[of], rounds[to], strict=True))

    results: list[Result] = []
    for name, of_side in rounds.items():
        side, _, encoder = name.partition(", ")
        results.append(
            Result(
                scenario=shape.name,
                side=side,
                encoder=encoder,
                cpu_ms=statistics.median(r.cpu_s for r in of_side) / shape.num_conversations * 1e3,
                wall_ms=statistics.median(r.wall_s for r in of_side) / shape.num_conversations * 1e3,
                verl_to_it=ratio(VERL, name),
                it_to_floor=ratio(name, f"floor, {encoder or ENCODERS[-1]}"),
            )
        )
    return results


def print_table(results: Sequence[Result]) -> None:
    table = Table(title="One trajectory without the model")
    for column in ("scenario", "side", "encoder"):
        table.add_column(column)
    for column in ("CPU, ms", "wall, ms", "verl to it", "it to the floor"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            result.scenario,
            result.side,
            result.encoder,
            f"{result.cpu_ms:.3f}",
            f"{result.wall_ms:.3f}",
            "" if result.verl_to_it is None else f"{result.verl_to_it:.1f}",
            "" if result.it_to_floor is None else f"{result.it_to_floor:.2f}",
            end_section=result is results[-1]
            or result.scenario != results[results.index(result) + 1].scenario,
        )
    Console(width=120).print(table)


def missed_targets(results: Sequence[Result]) -> list[str]:
    missed: list[str] = []
    for result in results:
        if result.side != "ours":
            continue
        where = f"{result.scenario} with {result.encoder}"
        wanted = TARGETS_TO_VERL.get((result.scenario, result.encoder))
        if wanted is not None and result.verl_to_it is not None and result.verl_to_it < wanted:
            missed.append(f"{where}: verl takes {result.verl_to_it:.1f} times as long, below {wanted}")
        if result.it_to_floor is not None and result.it_to_floor > TARGET_TO_FLOOR:
            missed.append(f"{where}: {result.it_to_floor:.2f} times the floor, above {TARGET_TO_FLOOR}")
    return missed


def main() -> None:
    options = read_options(__doc__, shapes=SHAPES)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        make_workloads(Path(folder), shapes=options.shapes)
        started = commands(Path(folder), environment=options.environment)
        sides = [stack.enter_context(Side(name, command)) for name, command in started.items()]
        for shape in options.shapes:
            rounds = measure(shape, sides, num_rounds=options.num_rounds)
            results += results_of(shape, rounds)
    print_table(results)
    conclude(results, missed=missed_targets(results), json_file=options.json_file, is_quick=options.is_quick)


if __name__ == "__main__":
    main()

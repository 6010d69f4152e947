"""Command line of the benchmarks that compare with verl."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from overhead.rounds import BENCHMARKS
from overhead.shapes import Shape

NUM_ROUNDS, NUM_QUICK_ROUNDS = 9, 3


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command line."""

    environment: Path | None
    """Folder of the environment with verl. None omits verl."""
    is_quick: bool
    json_file: Path | None
    shapes: Sequence[Shape]

    @property
    def num_rounds(self) -> int:
        return NUM_QUICK_ROUNDS if self.is_quick else NUM_ROUNDS


def read_options(description: str | None, *, shapes: Sequence[Shape]) -> Options:
    """Parse the command line, and install verl in the given environment if it is missing.

    Args:
        description: Description of the benchmark.
        shapes: The available scenarios.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--environment",
        type=Path,
        metavar="FOLDER",
        help="environment with verl, which is installed if it is missing",
    )
    parser.add_argument("--quick", action="store_true", help="three rounds; targets are not enforced")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--scenario", action="append", choices=[shape.name for shape in shapes])
    arguments = parser.parse_args()
    environment = None if arguments.environment is None else arguments.environment.absolute()
    if environment is not None and not (environment / "bin" / "python").exists():
        subprocess.run(["bash", str(BENCHMARKS / "install_verl.sh"), str(environment)], check=True)
    chosen = [shape for shape in shapes if arguments.scenario is None or shape.name in arguments.scenario]
    return Options(environment, arguments.quick, arguments.json, chosen)

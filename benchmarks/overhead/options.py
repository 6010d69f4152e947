"""The command line of the benchmarks against verl."""

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
    """What was asked for."""

    environment: Path | None
    """Where verl is installed; None leaves it out."""
    is_quick: bool
    json_file: Path | None
    shapes: Sequence[Shape]

    @property
    def num_rounds(self) -> int:
        return NUM_QUICK_ROUNDS if self.is_quick else NUM_ROUNDS


def read_options(description: str | None, *, shapes: Sequence[Shape]) -> Options:
    """Reads the command line, and installs verl where it is to be and is not.

    Args:
        shapes: Those that there are to choose from.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--environment", type=Path, metavar="FOLDER", help="where verl is installed, or is to be"
    )
    parser.add_argument("--quick", action="store_true", help="three rounds; targets are not enforced")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--scenario", action="append", choices=[shape.name for shape in shapes])
    given = parser.parse_args()
    environment = None if given.environment is None else given.environment.absolute()
    if environment is not None and not (environment / "bin" / "python").exists():
        subprocess.run(["bash", str(BENCHMARKS / "install_verl.sh"), str(environment)], check=True)
    chosen = [shape for shape in shapes if given.scenario is None or shape.name in given.scenario]
    return Options(environment, given.quick, given.json, chosen)

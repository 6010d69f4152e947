"""End of a benchmark: its results file, its missed targets, and its exit status."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console


def conclude(
    results: Sequence[Any], *, missed: Sequence[str], json_file: Path | None, is_quick: bool
) -> None:
    """Write the results, and print the missed targets.

    Args:
        results: Instances of data classes.
        missed: A line for each missed target.
        json_file: File for the results. None writes no file.
        is_quick: Whether missed targets are only printed.

    Raises:
        SystemExit: A target was missed, and `is_quick` is false.
    """
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(result) for result in results], indent=1))
    for line in missed:
        Console().print(f"missed: {line}", highlight=False)
    if missed and not is_quick:
        raise SystemExit(1)

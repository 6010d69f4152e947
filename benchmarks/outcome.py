"""How a benchmark ends: its results in a file, what it missed, and its exit status."""

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
    """Writes the results, and says which targets were missed.

    Args:
        results: Data classes.
        missed: A line for each target.
        json_file: None writes nothing.
        is_quick: Targets are not enforced.

    Raises:
        SystemExit: One was missed.
    """
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(result) for result in results], indent=1))
    for line in missed:
        Console().print(f"missed: {line}", highlight=False)
    if missed and not is_quick:
        raise SystemExit(1)

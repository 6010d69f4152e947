"""Says what a file is that is not Parquet, so that nobody is sent to remove a good one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

PARQUET_MAGIC = b"PAR1"
JOURNAL_MAGIC = b"agent-loop journal "
MAX_LINE = 1 << 20
"""Bytes of the first line that are looked at."""


def what_is(path: Path) -> str:
    """Return what a file that cannot be read as Parquet is, and what to do, as the end of a sentence."""
    try:
        with path.open("rb") as file:
            first_line = file.readline(MAX_LINE)
    except OSError as error:
        return f"cannot be opened ({error.strerror}); correct that, or give another file"
    if first_line.startswith(PARQUET_MAGIC):
        return "is a Parquet file that is damaged or was cut off; copy it again, or move it away to read the others"
    if first_line.startswith(JOURNAL_MAGIC):
        return (
            "is the journal of a rollout that did not end; resume that with --resume, and give what it writes"
        )
    record = _json_object(first_line)
    if "trajectory_id" in record and "segments" in record:
        stored = path.with_suffix(".parquet")
        if stored != path and stored.is_file():
            return f"holds trajectories as JSON lines; give {str(stored)!r}, which holds the same as Parquet"
        return (
            "holds trajectories as JSON lines, which other programs read; roll out into a file that ends in .parquet, "
            "as in `agent-loop rollout config.yaml --out sampled.parquet`"
        )
    if record:
        return "holds JSON, but not trajectories; give the folder of a run, or a Parquet file of trajectories"
    return "is not a Parquet file; give the folder of a run, or a Parquet file of trajectories"


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}

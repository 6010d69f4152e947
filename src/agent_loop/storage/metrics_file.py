"""Metrics file of a run: its reader, and what else the folder holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from agent_loop.errors import DataError

METRICS_FILE = "metrics.jsonl"
"""Name of the metrics file in a run's folder."""
CONFIG_FILE = "config.yaml"
"""Name of the file with a run's settings, in the same folder."""
CHECKPOINTS_FOLDER = "checkpoints"
"""Name of the folder of a run's checkpoints, in the same folder."""

VERLS_NAMES = {
    "critic/score/mean": "reward/mean",
    "critic/score/min": "reward/min",
    "critic/score/max": "reward/max",
    "num_turns/mean": "rollout/num_turns/mean",
    "response_length/mean": "rollout/response_length/mean",
    "response_length/max": "rollout/response_length/max",
    "actor/pg_loss": "actor/loss",
    "actor/pg_clipfrac": "actor/clip_fraction",
}
"""Metrics of verl's trainer, and their names in this package. Metrics that are not listed keep their names."""


def written_parts(run_dir: Path) -> list[str]:
    """Return the names of what a run has written to its folder. A run that ended in its first step wrote nothing."""
    metrics = run_dir / METRICS_FILE
    has_steps = metrics.is_file() and metrics.stat().st_size > 0
    found = ((CHECKPOINTS_FOLDER, (run_dir / CHECKPOINTS_FOLDER).exists()), (METRICS_FILE, has_steps))
    return [name for name, is_there in found if is_there]


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics file. An incomplete last line is left out.

    Raises:
        DataError: Another line is damaged.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                return
            raise DataError(
                f"{path} line {number} is not JSON ({error.msg}); correct that line, or copy the file again"
            ) from error
        yield metrics_of(values)


def metrics_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the step and the metrics of a line. The `file` logger of verl nests the metrics, under its own names."""
    nested = line.get("data")
    if not isinstance(nested, Mapping):
        return dict(line)
    metrics = cast(Mapping[str, Any], nested)
    return {"step": line.get("step")} | {VERLS_NAMES.get(name, name): metrics[name] for name in metrics}

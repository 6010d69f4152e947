"""Evaluation of stored trajectories."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_loop.errors import DataError
from agent_loop.storage.arrow import pa, parquet
from agent_loop.storage.schema import METADATA
from agent_loop.training.evaluation.scores import Evaluation, row_result, score
from agent_loop.trajectory import FailureKind
from agent_loop.types import Row

COLUMNS = ("group", "rollout", "reward", "stop_reason", "failure", "failure_kind", "incidents", "row")
SCORE_COLUMNS = COLUMNS[:-2]
"""Columns from which the scores are computed without the prompts."""


@dataclass(frozen=True, slots=True)
class StoredEvaluation:
    """Evaluation of stored trajectories, and the rows of the data set."""

    evaluation: Evaluation
    rows: tuple[Row, ...]
    """By index; empty where no trajectory of a row is stored."""


def evaluate_stored(paths: Sequence[Path], *, with_prompts: bool = True) -> StoredEvaluation:
    """Evaluate the trajectories of Parquet files, as `summarise` evaluates trajectories.

    Args:
        paths: Files of one evaluation or of one validation.
        with_prompts: Whether to read the rows of the data set. Without them the results have no prompts and no digests.

    Raises:
        DataError: A file cannot be read.
    """
    samples: defaultdict[int, list[tuple[int, float | None]]] = defaultdict(list)
    rows: dict[int, Row] = {}
    stop_reasons: Counter[str] = Counter()
    incidents: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    threshold = 1.0
    for path in paths:
        columns, threshold = _read(path, COLUMNS if with_prompts else SCORE_COLUMNS)
        for stored in columns:
            stop_reasons[str(stored["stop_reason"])] += 1
            incidents.update(str(item["kind"]) for item in json.loads(stored.get("incidents") or "[]"))
            kind = stored.get("failure_kind") or FailureKind.CODE
            if stored.get("failure") is not None:
                failures[str(kind)] += 1
                if kind != FailureKind.CODE:
                    continue  # infrastructure failed it, so it is in no score
            group = stored["group"]
            samples[group].append((stored["rollout"], stored["reward"]))
            if group not in rows and stored.get("row"):
                rows[group] = json.loads(stored["row"])
    results = tuple(
        row_result(group, row=rows.get(group, {}), samples=found, success_threshold=threshold)
        for group, found in sorted(samples.items())
    )
    evaluation = Evaluation(
        num_trajectories=sum(stop_reasons.values()),
        scores=score(results),
        rows=results,
        stop_reasons=dict(stop_reasons.most_common()),
        incidents=dict(incidents.most_common()),
        failures=dict(failures.most_common()),
    )
    return StoredEvaluation(
        evaluation, tuple(rows.get(group, {}) for group in range(max(rows, default=-1) + 1))
    )


def _read(path: Path, names: Sequence[str]) -> tuple[list[Mapping[str, Any]], float]:
    """Return the rows of a file with the named columns, and the least reward that counts as a success."""
    try:
        with parquet.ParquetFile(path) as stored:
            table = stored.read([name for name in names if name in stored.schema_arrow.names])
            metadata: Mapping[bytes, bytes] = stored.metadata.metadata or {}
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{str(path)!r} cannot be read ({str(error).splitlines()[0]}); copy the file again"
        ) from error
    return table.to_pylist(), float(metadata.get(METADATA.success_threshold.encode(), b"1.0"))

"""Evaluations on disk: `summary.json`, and stored trajectories."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from agent_loop.errors import DataError
from agent_loop.storage.exclusive import whole_file
from agent_loop.storage.run import StoredRun
from agent_loop.training.evaluation.scores import (
    Evaluation,
    EvaluationDifference,
    Sample,
    Scores,
    difference,
    evaluate,
    pair_rows,
    score_categories,
)
from agent_loop.trajectory import FailureKind
from agent_loop.types import Row

SUMMARY_FILE = "summary.json"
COLUMNS = ("group", "rollout", "reward", "stop_reason", "failure", "failure_kind", "incidents", "row")
"""Columns from which the scores are computed."""


class Comparison(BaseModel):
    """Comparison of an evaluation with another one."""

    model_config = ConfigDict(frozen=True)

    path: str
    """Path of the other summary."""
    other_model: str
    total: EvaluationDifference
    categories: Mapping[str, Mapping[str, EvaluationDifference]]
    """Differences by column and value."""


class EvaluationSummary(BaseModel):
    """Contents of `summary.json`."""

    model_config = ConfigDict(frozen=True)

    format: Literal[1] = 1
    model: str
    rows_of: str = ""
    """Setting that named the rows: `data.val_files`, `data.train_files` or `--data`; empty in older summaries."""
    settings: Mapping[str, Any]
    """Settings of the evaluation: digest of the rows, samples per row, and the sections that affect the tokens."""
    evaluation: Evaluation
    categories: Mapping[str, Mapping[str, Scores]] = {}
    """Scores by column and value."""
    comparison: Comparison | None = None

    @classmethod
    def of(
        cls,
        evaluation: Evaluation,
        *,
        model: str,
        rows_of: str = "",
        settings: Mapping[str, Any],
        columns: Mapping[str, Sequence[str]],
        other: tuple[Path, EvaluationSummary] | None = None,
    ) -> EvaluationSummary:
        """Return the summary of an evaluation, with a comparison if there is another one.

        `columns` holds the category of each row of the data set, by column.
        """
        comparison = other and compare_evaluations(
            evaluation,
            path=str(other[0]),
            other=other[1].evaluation,
            other_model=other[1].model,
            columns=columns,
        )
        return cls(
            model=model,
            rows_of=rows_of,
            settings=settings,
            evaluation=evaluation,
            categories={
                name: score_categories(evaluation.rows, categories=values) for name, values in columns.items()
            },
            comparison=comparison,
        )

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        with whole_file(path) as temporary:
            temporary.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_summary(path: Path) -> EvaluationSummary:
    """Read a summary from the file, or from its folder."""
    file = path / SUMMARY_FILE if path.is_dir() else path
    try:
        return EvaluationSummary.model_validate_json(file.read_bytes())
    except OSError as error:
        raise DataError(
            f"{str(file)!r} cannot be read ({error.strerror}); give a finished evaluation's folder, or its "
            f"{SUMMARY_FILE}"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(
            f"{str(file)!r} is not the summary of an evaluation: {f'{where}: ' if where else ''}{first['msg']}"
        ) from None


def compare_evaluations(
    evaluation: Evaluation,
    *,
    other: Evaluation,
    path: str,
    other_model: str,
    columns: Mapping[str, Sequence[str]],
) -> Comparison:
    """Return how much better an evaluation is than another one, on the rows that are in both."""
    pairs = pair_rows(evaluation.rows, others=other.rows)
    total = difference(pairs)
    if total is None:
        raise DataError(
            f"{path!r} has none of the rows that were evaluated; compare evaluations of the same rows"
        )
    by_column = {
        column: {
            name: found
            for name in sorted({categories[row.group] for row, _ in pairs})
            if (found := difference([pair for pair in pairs if categories[pair[0].group] == name]))
        }
        for column, categories in columns.items()
    }
    return Comparison(path=path, other_model=other_model, total=total, categories=by_column)


@dataclass(frozen=True, slots=True)
class StoredEvaluation:
    """Evaluation of stored trajectories, and the rows of the data set."""

    evaluation: Evaluation
    rows: tuple[Row, ...]
    """By index; empty where no trajectory of a row is stored."""


def evaluate_stored(paths: Sequence[Path]) -> StoredEvaluation:
    """Evaluate the trajectories of Parquet files, as `summarise` evaluates trajectories."""
    samples: list[Sample] = []
    rows: dict[int, Row] = {}
    threshold = 1.0
    for path in paths:
        run = StoredRun(path)
        threshold = run.files()[-1].success_threshold
        for stored in run.scalars(columns=COLUMNS).to_pylist():
            group, is_failed = stored["group"], stored.get("failure") is not None
            if group not in rows and stored.get("row"):
                rows[group] = json.loads(stored["row"])
            samples.append(
                Sample(
                    group,
                    stored["rollout"],
                    stored["reward"],
                    str(stored["stop_reason"]),
                    [str(incident["kind"]) for incident in json.loads(stored.get("incidents") or "[]")],
                    str(stored.get("failure_kind") or FailureKind.CODE) if is_failed else None,
                    rows.get(group, {}),
                )
            )
    most = max(rows, default=-1)
    return StoredEvaluation(
        evaluate(samples, success_threshold=threshold),
        tuple(rows.get(group, {}) for group in range(most + 1)),
    )

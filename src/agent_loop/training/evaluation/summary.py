"""File with the result of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from agent_loop.errors import DataError
from agent_loop.storage.whole_file import whole_file
from agent_loop.training.evaluation.categories import score_categories
from agent_loop.training.evaluation.comparison import EvaluationDifference, difference, pair_rows
from agent_loop.training.evaluation.scores import Evaluation, Scores

SUMMARY_FILE = "summary.json"


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
        """Return the summary of an evaluation, with scores per category, and a comparison.

        Args:
            evaluation: The evaluation.
            model: Name of the model.
            rows_of: See `EvaluationSummary.rows_of`.
            settings: See `EvaluationSummary.settings`.
            columns: Category of each row of the data set, by column.
            other: Path and summary of an evaluation to compare with.

        Raises:
            DataError: The other evaluation has none of the rows.
        """
        return cls(
            model=model,
            rows_of=rows_of,
            settings=settings,
            evaluation=evaluation,
            categories={
                column: score_categories(evaluation.rows, categories=categories)
                for column, categories in columns.items()
            },
            comparison=other
            and compare_evaluations(
                evaluation,
                path=str(other[0]),
                other=other[1].evaluation,
                other_model=other[1].model,
                columns=columns,
            ),
        )

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        with whole_file(path) as temporary:
            temporary.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_summary(path: Path) -> EvaluationSummary:
    """Read a summary.

    Args:
        path: The file, or its folder.

    Raises:
        DataError: The file is missing, or is not a summary.
    """
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
    """Return how much better an evaluation is than another one, on the rows that are in both.

    Args:
        evaluation: The evaluation.
        other: The other evaluation.
        path: Name of the other evaluation.
        other_model: Name of its model.
        columns: Category of each row of the data set, by column.

    Raises:
        DataError: The other evaluation has none of the rows.
    """
    pairs = pair_rows(evaluation.rows, others=other.rows)
    total = difference(pairs)
    if total is None:
        raise DataError(
            f"{path!r} has none of the rows that were evaluated; compare evaluations of the same rows"
        )
    by_column: dict[str, dict[str, EvaluationDifference]] = {}
    for column, categories in columns.items():
        names = dict.fromkeys(categories[row.group] for row, _ in pairs)
        by_name = {
            name: difference([p for p in pairs if categories[p[0].group] == name]) for name in sorted(names)
        }
        by_column[column] = {name: found for name, found in by_name.items() if found is not None}
    return Comparison(path=path, other_model=other_model, total=total, categories=by_column)

"""The file with the result of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from agent_loop.errors import DataError
from agent_loop.storage.whole_file import whole_file
from agent_loop.training.evaluation.categories import score_categories
from agent_loop.training.evaluation.comparison import Difference, difference, pair_rows
from agent_loop.training.evaluation.scores import Evaluation, Scores

SUMMARY_FILE = "summary.json"


class Comparison(BaseModel):
    """How much better an evaluation is than another one."""

    model_config = ConfigDict(frozen=True)

    path: str
    """The summary of the other one."""
    other_model: str
    total: Difference
    categories: Mapping[str, Mapping[str, Difference]]
    """By column and value."""


class EvaluationSummary(BaseModel):
    """What `summary.json` holds."""

    model_config = ConfigDict(frozen=True)

    format: Literal[1] = 1
    model: str
    rows_of: str = ""
    """What named the rows: `data.val_files`, `data.train_files` or `--data`; empty in a summary of an older version."""
    settings: Mapping[str, Any]
    """What was evaluated: the rows' digest, samples per row, and the sections that the tokens depend on."""
    evaluation: Evaluation
    categories: Mapping[str, Mapping[str, Scores]] = {}
    """By column and value."""
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
        """Tells the categories apart, and compares.

        Args:
            columns: By its name, the category of each row of the data set.
            other: An evaluation to compare with, and where it lies.

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
            comparison=other and _compare(evaluation, *other, columns=columns),
        )

    def write(self, path: Path) -> None:
        """Writes the file, whole or not at all."""
        with whole_file(path) as temporary:
            temporary.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_summary(path: Path) -> EvaluationSummary:
    """Reads a summary.

    Args:
        path: The file, or the folder that it is in.

    Raises:
        DataError: It is missing, or no summary.
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


def _compare(
    evaluation: Evaluation, path: Path, other: EvaluationSummary, *, columns: Mapping[str, Sequence[str]]
) -> Comparison:
    pairs = pair_rows(evaluation.rows, others=other.evaluation.rows)
    total = difference(pairs)
    if total is None:
        raise DataError(
            f"{str(path)!r} has none of the rows that were evaluated; compare evaluations of the same rows"
        )
    by_column: dict[str, dict[str, Difference]] = {}
    for column, categories in columns.items():
        names = dict.fromkeys(categories[row.group] for row, _ in pairs)
        by_name = {
            name: difference([p for p in pairs if categories[p[0].group] == name]) for name in sorted(names)
        }
        by_column[column] = {name: found for name, found in by_name.items() if found is not None}
    return Comparison(path=str(path), other_model=other.model, total=total, categories=by_column)

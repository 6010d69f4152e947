"""Evaluations that are stored: folders of `agent-loop eval`, and the validations of training runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from agent_loop.errors import DataError
from agent_loop.storage.run import StoredRun, parquet_files, step_files
from agent_loop.training.evaluation.estimates import MeanEstimate
from agent_loop.training.evaluation.scores import (
    Evaluation,
    RowResult,
    Scores,
    categories_of,
    changed_pairs,
    is_passed,
    pair_rows,
    score_categories,
)
from agent_loop.training.evaluation.summary import (
    SUMMARY_FILE,
    EvaluationSummary,
    StoredEvaluation,
    compare_evaluations,
    evaluate_stored,
    read_summary,
)
from agent_loop.types import Row
from agent_loop.viewer.run_files import stamp_of

WHOLE = "all"
"""Part of an evaluation's key that names the whole folder."""
MAX_ROWS = 500
"""Most rows that are listed."""
MAX_CATEGORIES = 30
"""Most values of a column of categories."""
MAX_KEPT = 64
"""Most evaluations that are kept in memory."""
SAMPLE_COLUMNS = ("split", "step", "trajectory_id", "group", "rollout", "reward", "is_success", "stop_reason")


@dataclass(frozen=True, slots=True)
class StoredEvaluationRef:
    """An evaluation that is stored."""

    key: str
    """`RUN|all`, or `RUN|val-12` for the validation of a step."""
    run: str
    path: Path
    """Folder of the run."""
    step: int | None
    """Step of the validation; None for the folder of an evaluation."""
    files: tuple[Path, ...]

    @property
    def has_summary(self) -> bool:
        return self.step is None and (self.path / SUMMARY_FILE).is_file()


class Evaluations:
    """Scores, categories and comparisons of the evaluations of some runs. Methods are thread-safe.

    Args:
        folders: Returns the folders of the runs by key.
    """

    def __init__(self, folders: Callable[[], Mapping[str, Path]]) -> None:
        self._folders = folders
        self._lock = threading.Lock()
        self._kept: dict[Any, StoredEvaluation] = {}

    def listed(self) -> list[dict[str, Any]]:
        """Return all evaluations without their scores. No trajectory is read."""
        return [
            {
                "key": ref.key,
                "run": ref.run,
                "name": ref.run.replace("~", "/") or ref.path.name,
                "step": ref.step,
                "has_trajectories": bool(ref.files),
            }
            for ref in self._refs()
        ]

    def scores(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return the scores of evaluations by key; an error where they cannot be read."""
        found: dict[str, Any] = {}
        for key in keys:
            try:
                ref = self._ref(key)
                summary = _summary(ref)
                evaluation = summary.evaluation if summary else self._stored(ref).evaluation
                found[key] = scores_values(evaluation.scores) | {"model": summary.model if summary else None}
            except DataError as error:
                found[key] = {"error": str(error)}
        return found

    def evaluation(self, key: str, *, by: str) -> dict[str, Any]:
        """Return an evaluation with its rows and categories.

        Args:
            key: Key of the evaluation.
            by: Column of the rows whose values are the categories; empty for the columns of the summary.
        """
        ref = self._ref(key)
        evaluation, rows, summary = self._read(ref)
        categories = dict(summary.categories) if summary and not by else {}
        if by:
            categories[by] = score_categories(evaluation.rows, categories=_categories(evaluation, rows, by))
        return {
            "key": key,
            "name": ref.run.replace("~", "/") or ref.path.name,
            "step": ref.step,
            "model": summary and summary.model,
            "rows_of": summary and summary.rows_of,
            "num_trajectories": evaluation.num_trajectories,
            "scores": scores_values(evaluation.scores),
            "stop_reasons": evaluation.stop_reasons,
            "incidents": evaluation.incidents,
            "failures": evaluation.failures,
            "columns": category_columns(rows),
            "categories": {
                column: {name: scores_values(scores) for name, scores in named.items()}
                for column, named in categories.items()
            },
            "rows": [asdict(row) for row in evaluation.rows[:MAX_ROWS]],
            "has_trajectories": bool(ref.files),
        }

    def comparison(self, key: str, other_key: str, *, by: str) -> dict[str, Any]:
        """Return how much better an evaluation is than another one, and the rows whose shares of successes differ."""
        ref, other_ref = self._ref(key), self._ref(other_key)
        evaluation, rows, _ = self._read(ref)
        other, _, other_summary = self._read(other_ref)
        columns = {by: _categories(evaluation, rows, by)} if by else {}
        found = compare_evaluations(
            evaluation,
            other=other,
            path=other_key,
            other_model=other_summary.model if other_summary else "",
            columns=columns,
        )
        pairs = pair_rows(evaluation.rows, others=other.rows)
        changed = changed_pairs(pairs)
        flips = [_flip(row, before) for row, before in changed]
        return {
            "columns": category_columns(rows),
            "total": _difference_values(found.total),
            "categories": {
                column: {name: _difference_values(each) for name, each in named.items()}
                for column, named in found.categories.items()
            },
            "num_rows": len(pairs),
            "num_pass": flips.count("pass"),
            "num_fail": flips.count("fail"),
            "changed": [
                {"flip": flip, "row": asdict(row), "other": asdict(before)}
                for (row, before), flip in zip(changed[:MAX_ROWS], flips, strict=False)
            ],
            "num_changed": len(changed),
        }

    def samples(self, key: str, *, group: int) -> list[dict[str, Any]]:
        """Return the trajectories of a row of an evaluation."""
        found: list[dict[str, Any]] = []
        for path in self._ref(key).files:
            table = StoredRun(path).scalars(columns=SAMPLE_COLUMNS)
            found += [row for row in table.to_pylist() if row["group"] == group]
        return sorted(found, key=lambda row: (row["rollout"], row["trajectory_id"]))

    def _refs(self) -> Iterator[StoredEvaluationRef]:
        for run, path in self._folders().items():
            if not path.is_dir():
                if path.suffix == ".parquet":
                    yield StoredEvaluationRef(f"{run}|{WHOLE}", run, path, None, (path,))
                continue
            steps = [file for file in step_files(path) if file.split == "val"]
            for file in steps:
                yield StoredEvaluationRef(f"{run}|val-{file.step}", run, path, file.step, (file.path,))
            is_evaluation = (path / SUMMARY_FILE).is_file()
            if is_evaluation or (not steps and not step_files(path) and parquet_files(path)):
                yield StoredEvaluationRef(f"{run}|{WHOLE}", run, path, None, tuple(parquet_files(path)))

    def _ref(self, key: str) -> StoredEvaluationRef:
        for ref in self._refs():
            if ref.key == key:
                return ref
        raise DataError(f"there is no evaluation {key!r}; it may have been removed")

    def _read(self, ref: StoredEvaluationRef) -> tuple[Evaluation, Sequence[Row], EvaluationSummary | None]:
        """Return an evaluation, the rows of its data set as far as they are stored, and its summary if it has one."""
        summary = _summary(ref)
        stored = self._stored(ref) if ref.files else None
        if summary is None and stored is None:
            raise DataError(f"{str(ref.path)!r} holds no trajectories and no {SUMMARY_FILE}")
        rows = stored.rows if stored else ()
        if summary is not None:
            return summary.evaluation, rows, summary
        assert stored is not None
        return stored.evaluation, rows, None

    def _stored(self, ref: StoredEvaluationRef) -> StoredEvaluation:
        stamp = tuple((path, stamp_of(path)) for path in ref.files)
        with self._lock:
            found = self._kept.pop(stamp, None) or evaluate_stored(ref.files)
            self._kept[stamp] = found
            while len(self._kept) > MAX_KEPT:
                self._kept.pop(next(iter(self._kept)))
            return found


def scores_values(scores: Scores) -> dict[str, Any]:
    """Return scores for the page: each estimate is its value and the ends of its interval."""
    return {
        "num_rows": scores.num_rows,
        "num_samples": scores.num_samples,
        "num_scored": scores.num_scored,
        "num_correct": scores.num_correct,
        "mean_reward": estimate_values(scores.mean_reward),
        "pass_at_k": {str(k): estimate_values(estimate) for k, estimate in scores.pass_at_k.items()},
    }


def category_columns(rows: Sequence[Row]) -> list[str]:
    """Return the columns with few different values, with dots for keys inside a column, as in `extra_info.level`."""
    values: dict[str, set[str]] = {}
    for row in rows:
        for name, value in _leaves(row, ""):
            if len(found := values.setdefault(name, set())) <= MAX_CATEGORIES:
                found.add(repr(value))
    return sorted(name for name, found in values.items() if 1 < len(found) <= MAX_CATEGORIES)


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(cast(Mapping[str, Any], value), f"{prefix}{name}.")
        elif value is None or isinstance(value, str | int | float):
            yield f"{prefix}{name}", value


def _categories(evaluation: Evaluation, rows: Sequence[Row], column: str) -> list[str]:
    """Return the category of each index of a row in the data set."""
    if not rows:
        raise DataError("the trajectories of the evaluation are not stored, so there are no columns")
    most = max((row.group for row in evaluation.rows), default=-1)
    return categories_of([*rows, *({} for _ in range(most + 1 - len(rows)))], column=column)


def _summary(ref: StoredEvaluationRef) -> EvaluationSummary | None:
    return read_summary(ref.path) if ref.has_summary else None


def _flip(row: RowResult, other: RowResult) -> str:
    """Return "pass" if a row is passed and was not before, "fail" if it is the other way round, else ""."""
    if is_passed(row) == is_passed(other):
        return ""
    return "pass" if is_passed(row) else "fail"


def _difference_values(difference: Any) -> dict[str, Any]:
    return {
        "num_rows": difference.num_rows,
        "pass_at_1": estimate_values(difference.pass_at_1),
        "mean_reward": estimate_values(difference.mean_reward),
    }


def estimate_values(estimate: MeanEstimate | None) -> list[float | None] | None:
    """Return the mean and its interval for the page."""
    return None if estimate is None else [estimate.value, estimate.low, estimate.high]

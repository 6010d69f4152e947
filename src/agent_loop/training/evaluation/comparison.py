"""Comparison of two evaluations, row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agent_loop.training.evaluation.estimates import MeanEstimate, estimate_difference, estimate_mean
from agent_loop.training.evaluation.scores import RowResult

Pair = tuple[RowResult, RowResult]


@dataclass(frozen=True, slots=True)
class EvaluationDifference:
    """Difference of two evaluations on the rows that are in both.

    Rows that are hard in both cancel out, so that the difference is more certain than either score.
    """

    num_rows: int
    pass_at_1: MeanEstimate
    mean_reward: MeanEstimate | None
    """None if no row was scored in both."""


def pair_rows(rows: Sequence[RowResult], *, others: Sequence[RowResult]) -> list[Pair]:
    """Return pairs of rows with the same prompt. Rows with equal prompts are paired in order."""
    name = _namer()
    by_name = {name(row): row for row in others}
    name = _namer()
    named = [(row, by_name.get(name(row))) for row in rows]
    return [(row, other) for row, other in named if other is not None]


def difference(pairs: Sequence[Pair]) -> EvaluationDifference | None:
    """Return how much better the first row of each pair is; None if there are no pairs."""
    if not pairs:
        return None
    rewards = [
        row.mean_reward - other.mean_reward
        for row, other in pairs
        if row.mean_reward is not None and other.mean_reward is not None
    ]
    num_samples = min(sum(pair[side].num_samples for pair in pairs) for side in (0, 1)) / len(pairs)
    return EvaluationDifference(
        num_rows=len(pairs),
        pass_at_1=estimate_difference(
            [_share(row) - _share(other) for row, other in pairs], num_samples=num_samples
        ),
        mean_reward=estimate_mean(rewards) if rewards else None,
    )


def is_passed(row: RowResult) -> bool:
    """Return whether at least half of the samples of a row are successes."""
    return 2 * row.num_correct >= row.num_samples


def changed_pairs(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs whose shares of successes differ, the largest difference first.

    Pairs of which one side is passed and the other is not come before the others.
    """

    def order(pair: Pair) -> tuple[bool, float, int]:
        row, other = pair
        return is_passed(row) == is_passed(other), -abs(_share(row) - _share(other)), row.group

    return sorted((pair for pair in pairs if _share(pair[0]) != _share(pair[1])), key=order)


def _namer() -> Callable[[RowResult], tuple[str, int]]:
    seen: Counter[str] = Counter()

    def name(row: RowResult) -> tuple[str, int]:
        seen[row.prompt_digest] += 1
        return row.prompt_digest, seen[row.prompt_digest]

    return name


def _share(row: RowResult) -> float:
    return row.num_correct / row.num_samples

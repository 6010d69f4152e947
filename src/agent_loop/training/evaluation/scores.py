"""Scores of trajectories: rewards, success and pass@k, in total, by category, and compared row by row."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from agent_loop.errors import DataError, did_you_mean
from agent_loop.recording.values import digest
from agent_loop.training.evaluation.estimates import (
    MeanEstimate,
    estimate_difference,
    estimate_mean,
    estimate_share,
    pass_at_k,
)
from agent_loop.training.metrics import (
    FAILURES,
    INCIDENT,
    REWARD_MEAN,
    STOP_REASON,
    SUCCESS_SHARE,
    UNSCORED_SHARE,
    VALIDATION,
)
from agent_loop.trajectory import FailureKind, Trajectory
from agent_loop.types import Row

MAX_PROMPT_CHARACTERS = 200
NO_CATEGORY = "-"
"""Category of rows whose column is absent or empty."""


@dataclass(frozen=True, slots=True)
class RowResult:
    """Result of one row of the data set. Several trajectories of one rollout are one sample, with the best reward."""

    group: int
    """Index of the row."""
    prompt: str
    """Last message of the prompt, shortened."""
    prompt_digest: str
    """Digest that identifies the row in another evaluation."""
    num_samples: int
    num_scored: int
    num_correct: int
    """Samples whose reward counts as success."""
    mean_reward: float | None
    """Mean over the scored samples; None if no sample is scored."""

    @property
    def success_share(self) -> float:
        return self.num_correct / self.num_samples


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of rows. A sample without a score is not a success, and is in no mean of rewards."""

    num_rows: int
    num_samples: int
    num_scored: int
    num_correct: int
    mean_reward: MeanEstimate | None
    """Mean over rows of their mean rewards; None if no sample is scored."""
    pass_at_k: Mapping[int, MeanEstimate]
    """For k = 1, 2, 4, ...: the mean over rows with at least k samples."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Evaluation of trajectories."""

    num_trajectories: int
    scores: Scores
    rows: tuple[RowResult, ...]
    stop_reasons: Mapping[str, int]
    """Number of trajectories by stop reason."""
    incidents: Mapping[str, int]
    """Number of incidents by kind."""
    failures: Mapping[str, int]
    """Number of trajectories that failed, by what failed. Those that infrastructure failed are in no score."""

    @property
    def success_share(self) -> float:
        """Share of the samples that are successes."""
        return self.scores.num_correct / max(1, self.scores.num_samples)

    def metrics(self) -> dict[str, float]:
        """Return the values for the metrics file, with the prefix of validation."""
        if not self.num_trajectories:
            return {}
        scores, values = self.scores, dict[str, float]()
        if scores.num_samples:
            values = {
                SUCCESS_SHARE: self.success_share,
                UNSCORED_SHARE: 1 - scores.num_scored / scores.num_samples,
                "pass@1/half_width": scores.pass_at_k[1].half_width or 0.0,
            }
        values |= {f"pass@{k}": estimate.value for k, estimate in scores.pass_at_k.items()}
        values |= {f"{FAILURES}{name}": float(n) for name, n in self.failures.items()}
        values |= {f"{STOP_REASON}{name}": n / self.num_trajectories for name, n in self.stop_reasons.items()}
        values |= {f"{INCIDENT}{name}": n / self.num_trajectories for name, n in self.incidents.items()}
        if scores.mean_reward is not None:
            values[REWARD_MEAN] = scores.mean_reward.value
        return {f"{VALIDATION}{name}": value for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class EvaluationDifference:
    """Difference of two evaluations on the rows that are in both.

    Rows that are hard in both cancel out, so that the difference is more certain than either score.
    """

    num_rows: int
    pass_at_1: MeanEstimate
    mean_reward: MeanEstimate | None
    """None if no row was scored in both."""


Pair = tuple[RowResult, RowResult]


class Sample(NamedTuple):
    """Fields of a trajectory that an evaluation reads."""

    group: int
    rollout: int
    reward: float | None
    stop_reason: str
    incidents: Sequence[str]
    """Kind of each incident."""
    failure: str | None
    """Kind of the failure."""
    row: Row


def summarise(trajectories: Sequence[Trajectory], *, success_threshold: float) -> Evaluation:
    """Evaluate trajectories. Samples with a reward of at least `success_threshold` are successes.

    Trajectories that infrastructure failed are left out of all scores.
    """
    samples = [
        Sample(
            t.group,
            t.rollout,
            t.reward,
            t.output.stop_reason.value,
            [incident.kind.value for incident in t.output.incidents],
            t.output.failure and t.output.failure.kind.value,
            t.row,
        )
        for t in trajectories
    ]
    return evaluate(samples, success_threshold=success_threshold)


def evaluate(samples: Sequence[Sample], *, success_threshold: float) -> Evaluation:
    """Evaluate samples, as `summarise` evaluates trajectories."""
    groups: defaultdict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.failure in (None, FailureKind.CODE):
            groups[sample.group].append(sample)
    rows = tuple(
        _row_result(group, found, success_threshold=success_threshold)
        for group, found in sorted(groups.items())
    )
    return Evaluation(
        num_trajectories=len(samples),
        scores=score(rows),
        rows=rows,
        stop_reasons=_counts(sample.stop_reason for sample in samples),
        incidents=_counts(kind for sample in samples for kind in sample.incidents),
        failures=_counts(sample.failure for sample in samples if sample.failure is not None),
    )


def _row_result(group: int, samples: Sequence[Sample], *, success_threshold: float) -> RowResult:
    best: dict[int, float | None] = {}
    for sample in samples:
        found = (best.get(sample.rollout), sample.reward)
        best[sample.rollout] = max((reward for reward in found if reward is not None), default=None)
    rewards = [reward for reward in best.values() if reward is not None]
    return RowResult(
        group=group,
        prompt=prompt_text(samples[-1].row),
        prompt_digest=prompt_digest(samples[-1].row),
        num_samples=len(best),
        num_scored=len(rewards),
        num_correct=sum(reward >= success_threshold for reward in rewards),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
    )


def score(rows: Sequence[RowResult]) -> Scores:
    """Return the scores of rows."""
    rewards = [row.mean_reward for row in rows if row.mean_reward is not None]
    most = max((row.num_samples for row in rows), default=0)
    return Scores(
        num_rows=len(rows),
        num_samples=sum(row.num_samples for row in rows),
        num_scored=sum(row.num_scored for row in rows),
        num_correct=sum(row.num_correct for row in rows),
        mean_reward=estimate_mean(rewards) if rewards else None,
        pass_at_k={k: _pass_at(k, rows=rows) for k in (2**power for power in range(most.bit_length()))},
    )


def prompt_digest(row: Row) -> str:
    """Return a digest of the prompt of a row."""
    return digest(row.get("raw_prompt"))


def prompt_text(row: Mapping[str, Any]) -> str:
    """Return the text of the last message of a row's prompt, shortened."""
    messages: Sequence[Mapping[str, Any]] = row.get("raw_prompt", ())
    content: Any = (messages[-1].get("content") if len(messages) else None) or ""
    if not isinstance(content, str):
        parts = cast(Sequence[Mapping[str, Any]], content)
        content = " ".join(str(part.get("text") or f"[{part.get('type')}]") for part in parts)
    text = _writable(" ".join(content.split()))
    return text if len(text) <= MAX_PROMPT_CHARACTERS else text[: MAX_PROMPT_CHARACTERS - 1] + "…"


def categories_of(rows: Sequence[Row], *, column: str) -> list[str]:
    """Return the category of each row of the data set: its value in a column, as text.

    A name with dots, such as `extra_info.level`, is a key inside a column.
    """
    values = [_value(row, column) for row in rows]
    if all(value is None for value in values):
        known = sorted({str(name) for row in rows for name in row})
        raise DataError(f"no row has a column {column!r}{did_you_mean(column, known)}")
    return [_text(value) for value in values]


def score_categories(rows: Sequence[RowResult], *, categories: Sequence[str]) -> dict[str, Scores]:
    """Return the scores of each category, sorted by name. `categories` are those of the whole data set."""
    names = sorted({categories[row.group] for row in rows}, key=_natural)
    return {name: score([row for row in rows if categories[row.group] == name]) for name in names}


def pair_rows(rows: Sequence[RowResult], *, others: Sequence[RowResult]) -> list[Pair]:
    """Return pairs of rows with the same prompt. Rows with equal prompts are paired in order."""
    by_name = dict(zip(_names(others), others, strict=True))
    return [(row, by_name[name]) for name, row in zip(_names(rows), rows, strict=True) if name in by_name]


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
    shares = [row.success_share - other.success_share for row, other in pairs]
    return EvaluationDifference(
        num_rows=len(pairs),
        pass_at_1=estimate_difference(shares, num_samples=num_samples),
        mean_reward=estimate_mean(rewards) if rewards else None,
    )


def is_passed(row: RowResult) -> bool:
    """Return whether at least half of the samples of a row are successes."""
    return row.success_share >= 0.5


def changed_pairs(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs whose shares of successes differ: first those of which one side is passed, then by size."""

    def order(pair: Pair) -> tuple[bool, float, int]:
        row, other = pair
        return is_passed(row) == is_passed(other), -abs(row.success_share - other.success_share), row.group

    return sorted((pair for pair in pairs if pair[0].success_share != pair[1].success_share), key=order)


def _pass_at(k: int, *, rows: Sequence[RowResult]) -> MeanEstimate:
    large = [row for row in rows if row.num_samples >= k]
    return estimate_share(
        [pass_at_k(row.num_samples, num_correct=row.num_correct, k=k) for row in large],
        num_draws=sum(row.num_samples for row in large) / k,
    )


def _counts(names: Iterable[str]) -> dict[str, int]:
    """Return counts, most common first."""
    return dict(Counter(names).most_common())


def _value(row: Mapping[str, Any], column: str) -> Any:
    if column in row:
        return row[column]
    outer, dot, rest = column.partition(".")
    inner = row.get(outer)
    return _value(cast(Mapping[str, Any], inner), rest) if dot and isinstance(inner, Mapping) else None


def _text(value: Any) -> str:
    if value is None or value == "":
        return NO_CATEGORY
    return _writable(value) if isinstance(value, str) else json.dumps(value, default=str)


def _writable(text: str) -> str:
    """Return the text without unpaired surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _natural(name: str) -> tuple[bool, float, str]:
    """Return a sort key that sorts numbers by size, before words."""
    try:
        return False, float(name), name
    except ValueError:
        return True, 0.0, name


def _names(rows: Sequence[RowResult]) -> Iterator[tuple[str, int]]:
    """Yield the digest of each row's prompt, and how often it came before."""
    seen: Counter[str] = Counter()
    for row in rows:
        seen[row.prompt_digest] += 1
        yield row.prompt_digest, seen[row.prompt_digest]

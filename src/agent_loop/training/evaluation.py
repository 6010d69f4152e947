"""What a set of trajectories is worth: rewards, success, pass@k, and why they ended."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent_loop.training.metrics import (
    INCIDENT,
    REWARD_MEAN,
    STOP_REASON,
    SUCCESS_SHARE,
    UNSCORED_SHARE,
    VALIDATION,
)
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row


@dataclass(frozen=True, slots=True)
class RowResult:
    """One row of the data set."""

    group: int
    row: Row
    num_samples: int
    num_correct: int
    """Samples with at least the reward that counts as success."""
    mean_reward: float | None
    """Over the scored samples; None if there are none."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A summary of trajectories. One that nothing scored counts as no success, and in no mean of rewards."""

    num_trajectories: int
    num_scored: int
    mean_reward: float | None
    """None if nothing was scored."""
    success_share: float
    pass_at_k: Mapping[int, float]
    """For k = 1, 2, 4, ...: the mean over rows with at least k samples."""
    rows: tuple[RowResult, ...]
    stop_reasons: Mapping[str, int]
    incidents: Mapping[str, int]
    """How often each kind was met."""

    def metrics(self) -> dict[str, float]:
        """For the metrics file, with the prefix of validation."""
        if not self.num_trajectories:
            return {}
        values = {
            SUCCESS_SHARE: self.success_share,
            UNSCORED_SHARE: 1 - self.num_scored / self.num_trajectories,
            **{f"pass@{k}": value for k, value in self.pass_at_k.items()},
            **{f"{STOP_REASON}{name}": n / self.num_trajectories for name, n in self.stop_reasons.items()},
            **{f"{INCIDENT}{name}": n / self.num_trajectories for name, n in self.incidents.items()},
        }
        if self.mean_reward is not None:
            values[REWARD_MEAN] = self.mean_reward
        return {f"{VALIDATION}{name}": value for name, value in values.items()}


def summarise(trajectories: Sequence[Trajectory], *, success_threshold: float) -> Evaluation:
    """Summarises trajectories; those with at least `success_threshold` as reward are successes."""
    groups: defaultdict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.group].append(trajectory)
    rows = tuple(
        _row_result(group, samples, success_threshold=success_threshold)
        for group, samples in sorted(groups.items())
    )
    rewards = [t.reward for t in trajectories if t.reward is not None]
    return Evaluation(
        num_trajectories=len(trajectories),
        num_scored=len(rewards),
        mean_reward=_mean(rewards),
        success_share=sum(row.num_correct for row in rows) / max(1, len(trajectories)),
        pass_at_k=_pass_at_powers_of_two(rows),
        rows=rows,
        stop_reasons=Counter(t.output.stop_reason.value for t in trajectories),
        incidents=Counter(i.kind.value for t in trajectories for i in t.output.incidents),
    )


def pass_at_k(num_samples: int, *, num_correct: int, k: int) -> float:
    """The probability that at least one of k samples is correct, estimated from more samples without bias:
    `1 - C(n - c, k) / C(n, k)` (Chen et al. 2021, arXiv 2107.03374, equation 1)."""
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(
            f"pass@{k} of {num_correct} correct out of {num_samples}; give 0 <= num_correct <= num_samples "
            "and 1 <= k <= num_samples"
        )
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def _row_result(group: int, samples: Sequence[Trajectory], *, success_threshold: float) -> RowResult:
    rewards = [t.reward for t in samples if t.reward is not None]
    return RowResult(
        group=group,
        row=samples[0].row,
        num_samples=len(samples),
        num_correct=sum(reward >= success_threshold for reward in rewards),
        mean_reward=_mean(rewards),
    )


def _pass_at_powers_of_two(rows: Sequence[RowResult]) -> dict[int, float]:
    most = max((row.num_samples for row in rows), default=0)
    estimates: dict[int, float] = {}
    for k in (2**power for power in range(most.bit_length())):
        of_rows = [
            pass_at_k(row.num_samples, num_correct=row.num_correct, k=k)
            for row in rows
            if row.num_samples >= k
        ]
        estimates[k] = sum(of_rows) / len(of_rows)
    return estimates


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None

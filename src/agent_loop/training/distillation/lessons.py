"""Scores of the trajectories of a step, for its batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from agent_loop.rollout.batch import RolloutBatch
from agent_loop.rollout.columns import as_tensor
from agent_loop.servers.scores import TokenScores
from agent_loop.training import metrics as names
from agent_loop.training.distillation.targets import LOG_PROBS, TEACHER, TOP_IDS, TOP_LOG_PROBS
from agent_loop.training.distillation.teachers import NotTaught


@dataclass(frozen=True, slots=True)
class Lesson:
    """Scores of the response tokens of one trajectory."""

    teacher: int
    """Number of the teacher in `distillation.teachers`."""
    scores: TokenScores


@dataclass(frozen=True, slots=True)
class Lessons:
    """Scores of the trajectories of a step by their teachers."""

    of_trajectories: Sequence[Lesson | None]
    """Lesson of each trajectory, in order; None for one that no teacher scored."""
    failures: Mapping[NotTaught, int] = field(default_factory=dict[NotTaught, int])
    """Number of trajectories that their teacher did not score, by reason."""
    wait_s: float = 0.0
    """Seconds between the end of the rollout and the last scores."""

    @property
    def is_empty(self) -> bool:
        return not any(self.of_trajectories)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the requests."""
        return {names.TEACHER_WAIT: self.wait_s} | {
            f"{names.NOT_TAUGHT}{kind}": float(count) for kind, count in self.failures.items()
        }

    def add_columns(self, batch: RolloutBatch) -> None:
        """Add the columns of `agent_loop.training.distillation.targets` to the batch of the trajectories."""
        shape = tuple(batch["responses"].shape)
        found = [lesson for lesson in self.of_trajectories if lesson is not None]
        teachers_B = np.full(shape[0], -1, np.int64)
        logprobs_BR = np.zeros(shape, np.float32)
        num_candidates = max((_num_candidates(lesson.scores) for lesson in found), default=0)
        top_ids_BRK = np.zeros((*shape, num_candidates), np.int32)
        top_logprobs_BRK = np.full((*shape, num_candidates), -np.inf, np.float32)
        for row, lesson in enumerate(self.of_trajectories):
            if lesson is None:
                continue
            scores, length = lesson.scores, len(lesson.scores.logprobs)
            teachers_B[row] = lesson.teacher
            logprobs_BR[row, :length] = scores.logprobs
            if scores.top_ids is not None and scores.top_logprobs is not None:
                count = _num_candidates(scores)
                top_ids_BRK[row, :length, :count] = scores.top_ids
                top_logprobs_BRK[row, :length, :count] = scores.top_logprobs
        batch[TEACHER], batch[LOG_PROBS] = as_tensor(teachers_B), as_tensor(logprobs_BR)
        if num_candidates:
            batch[TOP_IDS], batch[TOP_LOG_PROBS] = (
                as_tensor(top_ids_BRK),
                as_tensor(top_logprobs_BRK),
            )


def _num_candidates(scores: TokenScores) -> int:
    return 0 if scores.top_ids is None else scores.top_ids.shape[1]

"""Scoring of the trajectories of a step by their teachers, while other trajectories still run."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import numpy as np

from agent_loop.errors import ChatTemplateError, DataError, RolloutError, ServerError
from agent_loop.rollout.batch import RolloutBatch, as_tensor
from agent_loop.runtime.describe import describe_error
from agent_loop.servers.scores import TokenScores
from agent_loop.training import metrics as names
from agent_loop.training.distillation.targets import LOG_PROBS, TEACHER, TOP_IDS, TOP_LOG_PROBS
from agent_loop.training.distillation.teachers import NotTaught, Teacher, Teachers
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason


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


UNTAUGHT = (StopReason.FAILED, StopReason.CANCELLED)
"""Ends of trajectories that teachers are not asked about."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Reason why a teacher did not score a trajectory."""

    kind: NotTaught
    detail: str


_Result: TypeAlias = TokenScores | Failure


class Scoring:
    """Scores of the trajectories of one step. Created by `open_scoring`."""

    def __init__(
        self, teachers: Teachers, *, report: Callable[[str], None], tasks: asyncio.TaskGroup
    ) -> None:
        self._teachers = teachers
        self._report = report
        self._tasks = tasks
        self._running: dict[tuple[object, ...], asyncio.Task[_Result]] = {}

    def begin(self, trajectory: Trajectory) -> None:
        """Ask the teacher for the scores of a trajectory that has ended."""
        teacher = self._teacher_of(trajectory)
        if teacher is not None:
            self._task(trajectory, teacher)

    async def finish(self, trajectories: Sequence[Trajectory], *, label: str) -> Lessons:
        """Return the scores of the trajectories that are trained, and cancel all other requests."""
        started = time.monotonic()
        asked = [
            None if (teacher := self._teacher_of(t)) is None else (teacher, self._task(t, teacher))
            for t in trajectories
        ]
        wanted = {each[1] for each in asked if each is not None}
        for task in self._running.values():
            if task not in wanted:
                task.cancel()
        lessons: list[Lesson | None] = [None] * len(trajectories)
        failures: list[tuple[Trajectory, Teacher, Failure]] = []
        for number, each in enumerate(asked):
            if each is None:
                continue
            teacher, task = each
            result = await task
            if isinstance(result, Failure):
                failures.append((trajectories[number], teacher, result))
            else:
                lessons[number] = Lesson(self._teachers.numbers[teacher.name], result)
        self._explain(failures, label=label, has_lesson=any(lessons))
        return Lessons(
            lessons,
            failures=Counter(failure.kind for _, _, failure in failures),
            wait_s=time.monotonic() - started,
        )

    def _teacher_of(self, trajectory: Trajectory) -> Teacher | None:
        output = trajectory.output
        is_untaught = output.stop_reason in UNTAUGHT or not output.response_mask.any()
        return None if is_untaught else self._teachers.of(trajectory)

    def _task(self, trajectory: Trajectory, teacher: Teacher) -> asyncio.Task[_Result]:
        """Return the request for a trajectory, started if it is new. Equal texts are scored once."""
        output, hint_key = trajectory.output, teacher.config.hint_key
        hint = None if hint_key is None else str(trajectory.row.get(hint_key))
        key = (
            teacher.name,
            output.prompt_ids.tobytes(),
            output.response_ids.tobytes(),
            bool(output.attachments),
            hint,
        )
        if key not in self._running:
            self._running[key] = self._tasks.create_task(_score(teacher, trajectory))
        return self._running[key]

    def _explain(
        self, failures: Sequence[tuple[Trajectory, Teacher, Failure]], *, label: str, has_lesson: bool
    ) -> None:
        """Report the trajectories that were not scored."""
        if not failures:
            return
        counts = Counter((teacher.name, failure.kind) for _, teacher, failure in failures)
        counted = ", ".join(f"{count} by {name} ({kind})" for (name, kind), count in counts.most_common())
        trajectory, teacher, first = failures[0]
        example = f"{trajectory.trajectory_id} by {teacher.name}: {first.detail}"
        if not has_lesson:
            raise RolloutError(
                f"{label}: the teachers scored none of {len(failures)} trajectories ({counted}), first {example}; fix "
                "that, then resume the run"
            )
        self._report(f"{label}: not scored by their teachers: {counted}, first {example}")


@asynccontextmanager
async def open_scoring(teachers: Teachers, *, report: Callable[[str], None]) -> AsyncGenerator[Scoring]:
    """Run the requests to the teachers during the body. No request runs after it."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield Scoring(teachers, report=report, tasks=tasks)
    except BaseExceptionGroup as errors:
        first = cast(BaseException, errors.exceptions[0])
        raise first from first.__cause__


async def _score(teacher: Teacher, trajectory: Trajectory) -> _Result:
    output = trajectory.output
    if output.attachments:
        return Failure(NotTaught.ATTACHMENTS, "it has images or videos, which teachers cannot score")
    try:
        prompt_ids = teacher.prompt(trajectory)
    except (DataError, ChatTemplateError) as error:
        return Failure(NotTaught.HINT, describe_error(error))
    num_tokens = len(prompt_ids) + len(output.response_ids)
    if num_tokens > teacher.context_length:
        return Failure(
            NotTaught.TOO_LONG,
            f"it has {num_tokens} tokens for the teacher, over context_length={teacher.context_length}",
        )
    if not len(prompt_ids):
        return Failure(NotTaught.SERVER, "its prompt is empty, so nothing predicts its first token")
    try:
        return await teacher.score(np.concatenate([prompt_ids, output.response_ids]), start=len(prompt_ids))
    except (ServerError, TimeoutError) as error:
        return Failure(NotTaught.SERVER, describe_error(error))

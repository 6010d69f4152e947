"""Rollouts of training steps, which may run ahead of the weights."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

from msgspec import structs

from agent_loop.config import AlgorithmConfig
from agent_loop.config.training import OUTCOME
from agent_loop.rollout.forks import Fork, as_branches, find_forks, own_segments
from agent_loop.rollout.journal import StepJournal, StepKey, open_journal, training_settings
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.runtime.concurrency import run_together
from agent_loop.runtime.numeric import as_reward
from agent_loop.training import metrics as names
from agent_loop.training.advantages.estimate import SOURCE, estimator_needs
from agent_loop.training.distillation.scoring import Lessons
from agent_loop.training.row_selection import RowSelector, max_staleness
from agent_loop.training.run import Run
from agent_loop.training.samplers import RowResult, row_results
from agent_loop.trajectory import Trajectory, group_branches
from agent_loop.trajectory.branches import seat_of
from agent_loop.types import Row

OnTrajectory: TypeAlias = Callable[[Trajectory], None]


@dataclass(frozen=True, slots=True)
class Forked:
    """New continuations of the trajectories of a step."""

    branches: Sequence[Trajectory] = ()
    """Scored continuations, as branches of the rollouts that they fork."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class StepRollout:
    """Trajectories that a step is trained on."""

    trajectories: Sequence[Trajectory]
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics of the selection of the rows, and of the continuations."""
    baseline_rewards: Mapping[int, float] | None = None
    """Rewards of greedy rollouts by group; None if the estimator does not need them."""
    lessons: Lessons | None = None
    """Scores of the teachers; None without teachers."""
    rows: Sequence[int] = ()
    """Row of each group, by the number of the group: an index in the data set."""
    results: Sequence[RowResult] = ()
    """Results of all rows that were run, also of groups that were replaced."""
    replayed: Sequence[Trajectory] = ()
    """Trajectories of earlier steps that are trained again, in groups of their own."""
    forked: Forked = Forked()
    """Continuations of the trajectories, if the estimator needs them."""

    @property
    def trained(self) -> list[Trajectory]:
        """Trajectories of the update, without continuations."""
        return [*self.trajectories, *self.replayed]


TakeRollout: TypeAlias = Callable[[int], Coroutine[Any, Any, StepRollout]]
"""Function that waits for the rollout of the next step. Call it when all earlier steps are complete."""


@asynccontextmanager
async def rollouts_ahead(
    roll_out: Callable[[int], Coroutine[Any, Any, StepRollout]], *, max_staleness: int, last_step: int
) -> AsyncGenerator[TakeRollout]:
    """Run the rollouts of the next steps concurrently, as many as the bound on staleness allows.

    Step `k` trains the weights of version `k - 1`. Its rollout starts when version `k - 1 - max_staleness` is
    published. No token is older than that, however long a rollout takes, because the trainer waits for it. Synchronous
    training has the bound 0: the rollout of a step starts when the previous step is complete.

    The rollouts that are running at the end of the body are cancelled.
    """
    running: dict[int, asyncio.Task[StepRollout]] = {}

    async def take(step: int) -> StepRollout:
        for each in range(step, min(step + max_staleness, last_step) + 1):
            if each not in running:
                running[each] = asyncio.create_task(roll_out(each), name=f"rollout of step {each}")
        return await running.pop(step)

    try:
        yield take
    finally:
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)


def fork_metrics(
    forks: Sequence[Fork], continuations: Sequence[Trajectory], branches: Sequence[Trajectory]
) -> dict[str, float]:
    """Return the number of the continuations of a step, and their cost."""
    num_tokens = sum(
        len(segment) for each in continuations for segment in own_segments(forks[each.group], each)
    )
    metrics = {
        names.FORK_STATES: float(len(forks)),
        names.FORK_CONTINUATIONS: float(len(continuations)),
        names.FORK_TOKENS: float(num_tokens),
    }
    if continuations:
        metrics[names.FORK_LOST_SHARE] = 1 - len(branches) / len(continuations)
    return metrics


def with_variance(trajectories: Sequence[Trajectory], *, algorithm: AlgorithmConfig) -> list[Trajectory]:
    """Return the trajectories of groups in which several rollouts are scored and not all rewards are equal.

    In games, this holds for a seat of the group. With `gdpo`, it holds for one of `algorithm.reward_parts` with a
    weight.
    """
    values: defaultdict[tuple[int, Hashable], set[float]] = defaultdict(set)
    num_scored: Counter[tuple[int, Hashable]] = Counter()
    of_source = cache(algorithm.of_source)
    for branches in group_branches(trajectories):
        compared = [
            ((trajectory.group, (seat_of(trajectory), name)), value)
            for trajectory in branches
            for name, value in _compared(trajectory, of_source=of_source)
        ]
        for key, value in compared:
            values[key].add(value)
        num_scored.update({key for key, _ in compared})
    groups = {key[0] for key, found in values.items() if num_scored[key] > 1 and len(found) > 1}
    return [t for t in trajectories if t.group in groups]


def _compared(
    trajectory: Trajectory, *, of_source: Callable[[str | None], AlgorithmConfig]
) -> Iterator[tuple[str, float]]:
    """Yield the names and values that the estimator of a trajectory compares; nothing if it is not scored."""
    if trajectory.reward is None:
        return
    source = trajectory.row.get(SOURCE)
    settings = of_source(source if isinstance(source, str) else None)
    parts = settings.reward_parts if settings.adv_estimator == "gdpo" else {OUTCOME: 1.0}
    returned, fields = trajectory.reward_extra, trajectory.output.extra_fields
    for name in parts:
        value = trajectory.reward if name == OUTCOME else as_reward(returned.get(name, fields.get(name)))
        if value is not None and parts[name]:
            yield name, value


class StepRollouts:
    """Runs the rollouts of steps. Rollouts of several steps may run at once."""

    def __init__(self, run: Run, manager: AgentLoopManager, selector: RowSelector) -> None:
        self._config = run.config
        self._manager = manager
        self._selector = selector
        self._progress = run.progress
        # Without checkpoints, journals would never be dropped.
        keeps_journals = run.config.rollout.journal and run.config.trainer.save_every is not None
        self._journals = run.journals if keeps_journals else None
        self._settings = training_settings(run.config)
        self._needs = estimator_needs(run.config.algorithm.adv_estimator)

    async def run(self, step: int, *, on_trajectory: OnTrajectory | None = None) -> StepRollout:
        """Run the rollout of a step.

        Groups whose rewards are all equal are replaced by groups of other rows, up to `algorithm.max_refills` times.
        After that, the step has fewer groups. `on_trajectory` is called with each sampled trajectory as it ends.
        """
        started = time.monotonic()
        selection = self._selector.select(step)
        if selection.note is not None:
            self._progress.say(selection.note)
        rows, num_groups = list(selection.rows), self._config.data.train_batch_size - len(selection.replayed)
        kept, baselines = await self._run_rows(
            rows, step=step, num_groups=num_groups, on_trajectory=on_trajectory
        )
        results = self._results(kept, rows=rows)
        num_dropped = 0
        origins = {0: (f"step={step}", 0)}
        for refill in range(1, self._config.algorithm.max_refills + 1):
            informative = with_variance(kept, algorithm=self._config.algorithm)
            num_missing = num_groups - len({t.group for t in informative})
            num_used = len(rows) - len(selection.rows)
            others = selection.spare[num_used : num_used + num_missing]
            if not others:
                break
            first_group = len(rows)
            origins[first_group] = (f"step={step}/refill={refill}", first_group)
            rows += others
            num_dropped += num_missing
            more, their_baselines = await self._run_rows(
                others, step=step, num_groups=len(others), refill=refill, on_trajectory=on_trajectory
            )
            results += self._results(more, rows=others)
            kept = [*informative, *(structs.replace(t, group=t.group + first_group) for t in more)]
            baselines |= {group + first_group: reward for group, reward in their_baselines.items()}
        forked = await self._fork(kept, step=step, origins=origins) if self._needs.forks else Forked()
        return StepRollout(
            kept,
            time.monotonic() - started,
            metrics={**selection.metrics, **forked.metrics, names.DROPPED_GROUPS: float(num_dropped)},
            baseline_rewards=baselines or None,
            rows=rows,
            results=results,
            replayed=self._selector.replayed(selection, first_group=len(rows)),
            forked=forked,
        )

    def complete(self, step: int, rollout: StepRollout) -> None:
        """Tell the selection of later rows the results of a step that is complete."""
        self._selector.observe(
            step,
            rollout.results,
            informative=with_variance(rollout.trajectories, algorithm=self._config.algorithm),
            rows=rollout.rows,
        )

    def _results(self, trajectories: Sequence[Trajectory], *, rows: Sequence[int]) -> list[RowResult]:
        threshold = self._config.reward.success_threshold
        return row_results(trajectories, rows=rows, success_threshold=threshold)

    async def _fork(
        self, trajectories: Sequence[Trajectory], *, step: int, origins: Mapping[int, tuple[str, int]]
    ) -> Forked:
        """Continue the trajectories anew that may be trained."""

        def origin(group: int) -> tuple[str, int]:
            label, first_group = origins[max(first for first in origins if first <= group)]
            return label, group - first_group

        algorithm, label = self._config.algorithm, f"step={step}"
        if algorithm.drop_zero_variance_groups:
            trajectories = with_variance(trajectories, algorithm=algorithm)
        forks, reasons = find_forks(trajectories, config=algorithm.fork, origin=origin)
        if reasons and not forks:
            self._progress.say(f"{label}: no trajectory can be forked; {reasons[0]}")
        n, rows = algorithm.fork.continuations, [fork.trajectory.row for fork in forks]
        continuations: list[Trajectory] = []
        if forks:
            async with self._journal(rows, step=step, forks=forks) as journal:
                with self._progress.rollout(num_trajectories=len(forks) * n) as note:
                    continuations = await self._manager.run_forks(
                        forks, n=n, on_trajectory=note, journal=journal, label=f"{label}/forks"
                    )
        branches = as_branches(forks, continuations)
        return Forked(branches, fork_metrics(forks, continuations, branches))

    async def _run_rows(
        self,
        indices: Sequence[int],
        *,
        step: int,
        num_groups: int,
        on_trajectory: OnTrajectory | None,
        refill: int = 0,
    ) -> tuple[list[Trajectory], dict[int, float]]:
        """Return the trajectories of rows, and the rewards of greedy rollouts if the estimator needs them."""
        rows = [self._selector.rows[index] for index in indices]
        label = f"step={step}" + (f"/refill={refill}" if refill else "")
        n, weight = self._config.rollout.n, self._config.algorithm.turn_reward_weight

        async def sample(journal: StepJournal | None) -> list[Trajectory]:
            with self._progress.rollout(num_trajectories=num_groups * n) as note:

                def on_end(trajectory: Trajectory) -> None:
                    note(trajectory)
                    if on_trajectory is not None:
                        on_trajectory(trajectory)

                return await self._manager.run(
                    rows, n=n, num_groups=num_groups, on_trajectory=on_end, journal=journal, label=label
                )

        async def sample_greedily() -> list[Trajectory]:
            if not self._needs.greedy_rollouts:
                return []
            with self._progress.rollout(num_trajectories=len(rows)) as note:
                return await self._manager.run(
                    rows, n=1, on_trajectory=note, label=f"{label}/greedy", greedy=True
                )

        async with self._journal(rows, step=step, refill=refill) as journal:
            sampled, greedy = await run_together([sample(journal), sample_greedily()])
        baselines = {
            branches[0].group: _earned(branches, turn_weight=weight) for branches in group_branches(greedy)
        }
        return sampled, baselines

    @asynccontextmanager
    async def _journal(
        self, rows: Sequence[Row], *, step: int, refill: int = 0, forks: Sequence[Fork] = ()
    ) -> AsyncGenerator[StepJournal | None]:
        """Open the journal of these rows or forks, with the records of an earlier run that was killed."""
        if self._journals is None:
            yield None
            return
        key = StepKey.of(
            [fork.identity for fork in forks] or rows,
            step=step,
            weight_version=max(0, step - 1 - max_staleness(self._config)),
            num_samples=self._config.algorithm.fork.continuations if forks else self._config.rollout.n,
            settings=self._settings,
        )
        file = self._journals.file(step, refill=refill, is_of_forks=bool(forks))
        async with open_journal(file, key=key, rows=rows, resume=True, lock=False) as journal:
            if not journal.is_complete:
                # Journals of steps that start after this one were sampled with weights that will not exist again.
                dropped = self._journals.drop_after(step + max_staleness(self._config))
                if dropped:
                    self._progress.say(
                        f"step {step} is sampled again, so the journals of later steps are dropped "
                        f"({', '.join(map(str, dropped))}): their weights will not exist again"
                    )
            if journal.note:
                self._progress.say(journal.note)
            if journal.num_ended:
                what = "continuations" if forks else "rollouts"
                self._progress.say(f"step {step}: {journal.num_ended} {what} are in the journal")
            yield journal


def _earned(branches: Sequence[Trajectory], *, turn_weight: float) -> float:
    """Return the mean reward of the scored branches of a rollout; NaN if none is scored."""
    earned = [
        t.reward + turn_weight * sum(feedback.reward or 0.0 for feedback in t.output.feedback)
        for t in branches
        if t.reward is not None
    ]
    return sum(earned) / len(earned) if earned else math.nan

"""The stages of a run, in order: from its jobs to its trajectories.

1. Replay: a journal that holds the whole run ends it here.
2. Over-sample: cancel the rest once enough groups are complete.
3. Skip: take finished trajectories from the journal and from an earlier run.
4. Count: observers see each new trajectory.
5. Score: a batch reward function scores each group when its last rollout has ended.
6. Run: workers admit and run the remaining jobs, while the servers are awake.
7. Record: the journal notes that the run is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from agent_loop.rewards.function import BatchRewardFunction
from agent_loop.rollout.failures import FailureBudget
from agent_loop.rollout.group_scoring import scoring_groups
from agent_loop.rollout.jobs import Job
from agent_loop.rollout.journal.step import StepJournal
from agent_loop.rollout.over_sampling import num_groups_of, run_first_groups
from agent_loop.rollout.resumed import split_resumed
from agent_loop.rollout.server_sleep import SleepingServers
from agent_loop.rollout.workers import Workers
from agent_loop.trajectory import Trajectory

if TYPE_CHECKING:
    from agent_loop.rollout.prometheus_metrics import RolloutMetrics

OnTrajectory: TypeAlias = Callable[[Trajectory], None]


class RunStages:
    """Sequence of the stages of a run. Shared by all runs of a manager.

    Args:
        workers: Run the jobs.
        servers: Kept awake while jobs run.
        metrics: Count the trajectories. None counts nothing.
        batch_reward: Scores whole groups. None means that the workers score trajectories, if anything does.
        max_failed_share: Share of the trajectories that may fail.
        retries: How often `batch_reward` is called again for a group because something was unavailable.
    """

    def __init__(
        self,
        workers: Workers,
        *,
        servers: SleepingServers,
        metrics: RolloutMetrics | None,
        batch_reward: BatchRewardFunction | None,
        max_failed_share: float,
        retries: int,
    ) -> None:
        self._workers = workers
        self._servers = servers
        self._metrics = metrics
        self._batch_reward = batch_reward
        self._max_failed_share = max_failed_share
        self._retries = retries

    async def run(
        self,
        jobs: Sequence[Job],
        *,
        on_trajectory: OnTrajectory | None,
        num_groups: int | None = None,
        journal: StepJournal | None = None,
        earlier: Sequence[Trajectory] = (),
    ) -> list[Trajectory]:
        """Take jobs through all stages, and return their trajectories, ordered by group, then rollout.

        See `AgentLoopManager.run` for the arguments and the errors.
        """
        recorded = None if journal is None else journal.outcome()
        if recorded is not None:
            _report(recorded, on_trajectory)
            return recorded
        run_all = partial(self._run_all, jobs, journal=journal, earlier=earlier)
        if num_groups is None or num_groups >= num_groups_of(jobs):
            trajectories = await run_all(on_trajectory)
        else:
            trajectories = await run_first_groups(
                run_all, jobs=jobs, num_groups=num_groups, on_trajectory=on_trajectory
            )
        if journal is not None:
            await journal.complete(trajectories)
        return trajectories

    async def _run_all(
        self,
        jobs: Sequence[Job],
        on_trajectory: OnTrajectory | None,
        *,
        journal: StepJournal | None,
        earlier: Sequence[Trajectory],
    ) -> list[Trajectory]:
        """Skip finished jobs, and count, score and run the remaining ones."""
        finished, remaining = _split_finished(jobs, journal=journal, earlier=earlier)
        budget = FailureBudget(num_trajectories=len(jobs), max_share=self._max_failed_share)
        counting = (
            nullcontext(on_trajectory)
            if self._metrics is None
            else self._metrics.counting(len(remaining), then=on_trajectory)
        )
        with counting as count:
            report = _reporter(remaining, on_new=count, on_finished=on_trajectory)
            async with scoring_groups(
                self._batch_reward,
                jobs=jobs,
                budget=budget,
                journal=journal,
                on_trajectory=report,
                retries=self._retries,
            ) as scoring:
                _report(finished, scoring.add)
                await self._run_remaining(remaining, budget=budget, on_trajectory=scoring.add)
        return sorted(scoring.trajectories, key=lambda t: (t.group, t.rollout, t.branch or 0))

    async def _run_remaining(
        self, jobs: Sequence[Job], *, budget: FailureBudget, on_trajectory: OnTrajectory
    ) -> None:
        if not jobs:
            return
        async with self._servers.awake(), self._servers.watched():
            await self._workers.run(jobs, budget=budget, on_trajectory=on_trajectory)


def _split_finished(
    jobs: Sequence[Job], *, journal: StepJournal | None, earlier: Sequence[Trajectory]
) -> tuple[list[Trajectory], Sequence[Job]]:
    """Return the trajectories that the journal or an earlier run holds to their end, and the remaining jobs."""
    recorded, remaining = ([], jobs) if journal is None else journal.divide(jobs)
    resumed, remaining = split_resumed(remaining, earlier)
    return [*recorded, *resumed], remaining


def _reporter(
    running: Collection[Job], *, on_new: OnTrajectory | None, on_finished: OnTrajectory | None
) -> OnTrajectory:
    """Return a callback that distinguishes trajectories of running jobs from those that were finished before."""
    new = {(job.group, job.rollout) for job in running}

    def report(trajectory: Trajectory) -> None:
        is_new = (trajectory.group, trajectory.rollout) in new
        _report([trajectory], on_new if is_new else on_finished)

    return report


def _report(trajectories: Iterable[Trajectory], on_trajectory: OnTrajectory | None) -> None:
    if on_trajectory is not None:
        for trajectory in trajectories:
            on_trajectory(trajectory)

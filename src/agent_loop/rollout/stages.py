"""Parts of a run: servers that sleep between runs, rows that resume an earlier run, and runs that end early."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeAlias

from agent_loop.rollout.jobs import Job
from agent_loop.runtime.concurrency import run_shielded, run_while
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason

OnTrajectory: TypeAlias = Callable[[Trajectory], None]
SLEEP_TIMEOUT_S = 30.0


class SleepingServers:
    """Wakes the servers for the first user, and puts them to sleep after the last."""

    def __init__(self, server_manager: AsyncLLMServerManager, *, free_cache_engine: bool) -> None:
        self.server_manager = server_manager
        self._free_cache_engine = free_cache_engine
        self._lock = asyncio.Lock()
        self._num_users = 0

    @asynccontextmanager
    async def awake(self) -> AsyncGenerator[None]:
        """Keep the servers awake in the body."""
        if not self._free_cache_engine:
            yield
            return
        async with self._lock:
            if not self._num_users:
                await self.server_manager.pool.wake_up()
            self._num_users += 1
        try:
            yield
        finally:
            await run_shielded(self._release, timeout_s=SLEEP_TIMEOUT_S)

    async def _release(self) -> None:
        async with self._lock:
            self._num_users -= 1
            if not self._num_users:
                await self.server_manager.pool.sleep()


def split_resumed(jobs: Sequence[Job], earlier: Iterable[Trajectory]) -> tuple[list[Trajectory], list[Job]]:
    """Return the trajectories of finished jobs, and the other jobs.

    A job is finished if none of its trajectories was cancelled. An unfinished job gets the output of its trajectory if
    its loop can resume from that output, and starts from its prompt otherwise.
    """
    by_job: dict[tuple[int, int], list[Trajectory]] = {}
    for trajectory in earlier:
        by_job.setdefault((trajectory.group, trajectory.rollout), []).append(trajectory)
    if not by_job:
        return [], list(jobs)
    finished: list[Trajectory] = []
    remaining: list[Job] = []
    for job in jobs:
        trajectories = by_job.get((job.group, job.rollout), [])
        cancelled = [t.output for t in trajectories if t.output.stop_reason is StopReason.CANCELLED]
        if trajectories and not cancelled:
            finished += trajectories
        else:
            resumable = [output for output in cancelled if output.extra_fields.get("is_cancel")]
            remaining.append(replace(job, partial_output=resumable[0]) if resumable else job)
    return finished, remaining


async def run_first_groups(
    run: Callable[[OnTrajectory], Coroutine[Any, Any, object]],
    *,
    jobs: Sequence[Job],
    num_groups: int,
    on_trajectory: OnTrajectory,
) -> list[Trajectory]:
    """Run jobs until enough groups are complete, cancel the rest, and return the trajectories of these groups.

    A group whose trajectories all failed is returned only if too few other groups are left. Failures often end first.
    `run` runs the jobs, which have the same number for each group, and calls its argument with each trajectory that
    ends. `on_trajectory` is called with each trajectory whose group may still be kept.
    """
    first = _FirstGroups(num_groups, size=len(jobs) // num_groups_of(jobs))

    def add(trajectory: Trajectory) -> None:
        if first.add(trajectory):
            on_trajectory(trajectory)

    await run_while(run(add), condition=first.are_complete.wait())
    return first.trajectories


def num_groups_of(jobs: Sequence[Job]) -> int:
    """Return the number of groups that jobs belong to."""
    return len({job.group for job in jobs})


class _FirstGroups:
    """Collects trajectories until enough groups are complete."""

    def __init__(self, count: int, *, size: int) -> None:
        self.are_complete = asyncio.Event()
        """Set when enough groups are complete that have a trajectory that did not fail."""
        self._count = count
        self._size = size
        self._groups: defaultdict[int, list[Trajectory]] = defaultdict(list)
        self._complete: list[int] = []
        """Complete groups with a trajectory that did not fail, in the order in which they ended."""

    def add(self, trajectory: Trajectory) -> bool:
        """Add a trajectory that has ended. Return whether its group may still be among those that are kept."""
        if len(self._complete) == self._count and trajectory.group not in self._complete:
            return False
        group = self._groups[trajectory.group]
        group.append(trajectory)
        has_ended = self._has_ended(trajectory.group)
        if (
            has_ended
            and trajectory.group not in self._complete
            and any(t.output.failure is None for t in group)
        ):
            self._complete.append(trajectory.group)
            if len(self._complete) == self._count:
                # Later, since the branches of one rollout come one right after the other.
                asyncio.get_running_loop().call_soon(self.are_complete.set)
        return True

    @property
    def trajectories(self) -> list[Trajectory]:
        """Trajectories of the kept groups, ordered by group, then rollout.

        If too few groups are complete when all have ended, groups whose trajectories all failed are kept too.
        """
        failed = [group for group in self._groups if group not in self._complete and self._has_ended(group)]
        kept = [t for group in [*self._complete, *failed][: self._count] for t in self._groups[group]]
        return sorted(kept, key=lambda t: (t.group, t.rollout, t.branch or 0))

    def _has_ended(self, group: int) -> bool:
        return len({t.rollout for t in self._groups[group]}) == self._size

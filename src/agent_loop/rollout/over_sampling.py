"""Over-sampling: run more groups than are needed, and keep those that end first."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from agent_loop.rollout.jobs import Job
from agent_loop.runtime.concurrency import run_until
from agent_loop.trajectory import Trajectory


async def run_first_groups(
    run: Callable[[Callable[[Trajectory], None]], Coroutine[Any, Any, object]],
    *,
    jobs: Sequence[Job],
    num_groups: int,
    on_trajectory: Callable[[Trajectory], None] | None,
) -> list[Trajectory]:
    """Run jobs until enough groups are complete, cancel the rest, and return the trajectories of these groups.

    A group whose trajectories all failed is returned only if too few other groups are left. Failures often end first.

    Args:
        run: Runs the jobs, and calls its argument with each trajectory that ends.
        jobs: All jobs of the run, with the same number for each group.
        num_groups: Number of groups needed.
        on_trajectory: Called with each trajectory whose group may still be kept.
    """
    first = FirstGroups(num_groups, size=len(jobs) // num_groups_of(jobs))

    def add(trajectory: Trajectory) -> None:
        if first.add(trajectory) and on_trajectory is not None:
            on_trajectory(trajectory)

    await run_until(run(add), first.are_complete)
    return first.trajectories


def num_groups_of(jobs: Sequence[Job]) -> int:
    """Return the number of groups that jobs belong to."""
    return len({job.group for job in jobs})


class FirstGroups:
    """Collects trajectories until enough groups are complete.

    Args:
        count: Number of groups needed.
        size: Rollouts per group.
    """

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

"""What an earlier run of the same rows left to be done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from agent_loop.rollout.worker import Job
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason


def divide(jobs: Sequence[Job], earlier: Iterable[Trajectory]) -> tuple[list[Trajectory], list[Job]]:
    """The trajectories of the jobs that are over, and the other jobs, with what there is of them.

    A job is over if none of its trajectories was cancelled. Of the others, those go on whose loop left what is needed
    for that; the rest begin anew.

    Args:
        jobs: Of the later run.
        earlier: Trajectories of the run before, each with the group and the rollout of its job.
    """
    by_place: dict[tuple[int, int], list[Trajectory]] = {}
    for trajectory in earlier:
        by_place.setdefault((trajectory.group, trajectory.rollout), []).append(trajectory)
    if not by_place:
        return [], list(jobs)
    over: list[Trajectory] = []
    rest: list[Job] = []
    for job in jobs:
        left = by_place.get((job.group, job.rollout), [])
        cancelled = [each.output for each in left if each.output.stop_reason is StopReason.CANCELLED]
        if left and not cancelled:
            over += left
        else:
            parts = [output for output in cancelled if output.extra_fields.get("is_cancel")]
            rest.append(replace(job, partial_output=parts[0]) if parts else job)
    return over, rest

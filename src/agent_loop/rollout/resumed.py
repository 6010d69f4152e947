"""Separate the jobs that an earlier run of the same rows finished from those that are still to be run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from agent_loop.rollout.jobs import Job
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason


def split_resumed(jobs: Sequence[Job], earlier: Iterable[Trajectory]) -> tuple[list[Trajectory], list[Job]]:
    """Return the trajectories of finished jobs, and the other jobs.

    A job is finished if none of its trajectories was cancelled. An unfinished job gets the output of its trajectory if
    its loop can resume from that output, and starts from its prompt otherwise.

    Args:
        jobs: Jobs of the later run.
        earlier: Trajectories of the earlier run. Their groups and rollouts are those of the jobs.
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

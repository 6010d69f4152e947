"""The interface between the manager and its workers, and its implementation for workers in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

from agent_loop.rollout.failures import FailureBudget
from agent_loop.rollout.gate import AdmissionGate
from agent_loop.rollout.jobs import Job
from agent_loop.rollout.worker import AgentLoopWorker
from agent_loop.runtime.concurrency import run_together
from agent_loop.trajectory import Trajectory


class Workers(Protocol):
    """All workers of a manager. Every method is called on one event loop."""

    async def start(self) -> None:
        """Start the workers. Called once, when the servers are up."""
        ...

    async def run(
        self,
        jobs: Sequence[Job],
        *,
        budget: FailureBudget | None = None,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """Run each job exactly once, as `AgentLoopWorker.run` does. Nothing is in flight after it returns or raises."""
        ...

    def cancel(self, trajectory_id: str) -> bool:
        """End one trajectory with `cancelled`, its tokens kept. Return whether it was in flight."""
        ...

    def cancel_all(self) -> None:
        """End every trajectory of the present runs, as `AgentLoopWorker.cancel_all` does."""
        ...

    async def set_weight_version(self, weight_version: int) -> None:
        """Set the weight version that the servers have from now on."""
        ...

    async def close(self) -> None:
        """Close the workers."""
        ...


class LocalWorkers:
    """Workers on this event loop. Implements `Workers`."""

    def __init__(self, workers: Sequence[AgentLoopWorker]) -> None:
        self._workers = tuple(workers)

    @property
    def gates(self) -> set[AdmissionGate]:
        """Gates that admit the workers' trajectories. Workers may share a gate."""
        return {worker.gate for worker in self._workers}

    async def start(self) -> None:
        pass

    async def run(
        self,
        jobs: Sequence[Job],
        *,
        budget: FailureBudget | None = None,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        chunks = await run_together(
            worker.run(chunk, budget=budget, on_trajectory=on_trajectory)
            for worker, chunk in zip(self._workers, split(jobs, len(self._workers)), strict=True)
        )
        return [trajectory for chunk in chunks for trajectory in chunk]

    def cancel(self, trajectory_id: str) -> bool:
        return any(worker.cancel(trajectory_id) for worker in self._workers)

    def cancel_all(self) -> None:
        for worker in self._workers:
            worker.cancel_all()

    async def set_weight_version(self, weight_version: int) -> None:
        pass

    async def close(self) -> None:
        pass


def split(jobs: Sequence[Job], num_chunks: int) -> list[Sequence[Job]]:
    """Split jobs into contiguous chunks whose sizes differ by at most one."""
    cuts = [len(jobs) * chunk // num_chunks for chunk in range(num_chunks + 1)]
    return [jobs[start:end] for start, end in pairwise(cuts)]

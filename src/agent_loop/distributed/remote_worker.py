"""Driver's handle of one worker in another process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

from agent_loop.distributed.messages import unpack_trajectories
from agent_loop.distributed.ray_module import (
    ActorLost,
    await_result,
    cancel_stream,
    iterate_results,
    load_ray,
)
from agent_loop.distributed.worker_actor import WorkerSetup
from agent_loop.rollout.jobs import Job
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.trajectory import Trajectory

CANCEL_TIMEOUT_S = 30.0


class RemoteWorker:
    """Worker in a Ray actor."""

    def __init__(self, name: str, *, actor: Any, setup: WorkerSetup) -> None:
        self.name = name
        self.client = ""
        """Name of the worker at the servers. Every start of its process gets a new one."""
        self.pid = 0
        self.is_alive = False
        self._actor = actor
        self._setup = setup

    async def start(self) -> None:
        """Start the worker, also after its process was restarted."""
        self.client, self.pid = await await_result(self._actor.start.remote(self._setup))
        self.is_alive = True

    async def run(
        self, jobs: Sequence[Job], *, weight_version: int
    ) -> AsyncGenerator[tuple[Sequence[tuple[str, bytes]], list[Trajectory]]]:
        """Run jobs, and yield records of jobs with logs, and trajectories that ended, those of one job together.

        Resuming the generator confirms that both are stored. Closing the generator cancels the remaining jobs.
        """
        run_id, is_over = uuid4().hex, False
        by_id = {job.job_id: job for job in jobs}
        bare = [replace(job, log=None) for job in jobs]
        records = {job.job_id: job.log.record for job in jobs if job.log is not None}
        running = self._actor.run.options(num_returns="streaming").remote(
            run_id, bare, records, weight_version
        )
        try:
            async with aclosing(iterate_results(running)) as updates:
                async for update in updates:
                    yield update.records, unpack_trajectories(update.trajectories, jobs=by_id)
                    self._actor.confirm.remote(run_id)
            is_over = True
        except ActorLost:
            is_over = True
            raise
        finally:
            if not is_over:
                await run_shielded(partial(self._end_run, running, run_id), timeout_s=CANCEL_TIMEOUT_S)

    def cancel(self, trajectory_id: str) -> None:
        self._actor.cancel.remote(trajectory_id)

    def cancel_all(self) -> None:
        self._actor.cancel_all.remote()

    async def set_weight_version(self, weight_version: int) -> None:
        with suppress(ActorLost):
            await await_result(self._actor.set_weight_version.remote(weight_version))

    def call(self, method: str) -> Any:
        """Call a method of the actor, for tests. Return a reference to its result."""
        return getattr(self._actor, method).remote()

    def kill(self) -> None:
        self.is_alive = False
        load_ray().kill(self._actor)

    async def _end_run(self, running: Any, run_id: str) -> None:
        await cancel_stream(running)
        with suppress(ActorLost):
            await await_result(self._actor.end_run.remote(run_id))

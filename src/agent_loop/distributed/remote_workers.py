"""Driver's handle of all workers in other processes. A row whose worker dies is resumed by another worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from agent_loop.distributed.job_batch import JobBatch, JobChunk
from agent_loop.distributed.ray_module import ActorLost
from agent_loop.distributed.remote_worker import RemoteWorker
from agent_loop.errors import AgentLoopError, RolloutError
from agent_loop.recording.row_log import RowLog
from agent_loop.rollout.failures import FailureBudget
from agent_loop.rollout.jobs import Job
from agent_loop.runtime.concurrency import run_together
from agent_loop.trajectory import Trajectory

logger = logging.getLogger(__name__)

RETRY_INTERVAL_S = 0.5


def _with_log(job: Job) -> Job:
    """Return the job with a log, also where no journal is kept.

    The batch remembers what a row's worker recorded, so that the row's next worker resumes it, and does not repeat
    calls of tools with `on_replay: once`.
    """
    return job if job.log is not None else replace(job, log=RowLog(job.job_id))


class RemoteWorkers:
    """All workers of a run, in Ray actors. Implements `agent_loop.rollout.worker.Workers`."""

    def __init__(
        self,
        make_workers: Callable[[], Sequence[RemoteWorker]],
        *,
        on_death: Callable[[str], Awaitable[None]],
        restart_timeout_s: float,
        max_row_restarts: int,
    ) -> None:
        """Create the handle. No worker is started yet.

        Args:
            make_workers: Creates the actors. Called by `start`, once the servers have started.
            on_death: Called with the client name of a worker that died, to free the worker's sessions at the servers.
            restart_timeout_s: Seconds that a batch waits for a worker while no worker is alive.
            max_row_restarts: Restarts of a row, the last ones without other rows, before the row fails.
        """
        self.workers: Sequence[RemoteWorker] = ()
        self._make_workers = make_workers
        self._on_death = on_death
        self._restart_timeout_s = restart_timeout_s
        self._max_row_restarts = max_row_restarts
        self._weight_version = 0
        self._batches: list[JobBatch] = []

    async def start(self) -> None:
        self.workers = self._make_workers()
        await run_together(worker.start() for worker in self.workers)

    async def run(
        self,
        jobs: Sequence[Job],
        *,
        budget: FailureBudget | None = None,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """Run jobs. See `Workers.run`."""

        def note(trajectory: Trajectory) -> None:
            if on_trajectory is not None:
                on_trajectory(trajectory)
            if budget is not None:
                budget.count(trajectory)

        batch = JobBatch([_with_log(job) for job in jobs], note)
        self._batches.append(batch)
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self.workers:
                    if not worker.is_alive:
                        group.create_task(self._restart(worker, batch))
                await self._assign_jobs(batch, group)
        except BaseExceptionGroup as failures:
            raise cast(BaseException, failures.exceptions[0]) from None
        finally:
            self._batches.remove(batch)
        return batch.trajectories

    def cancel(self, trajectory_id: str) -> bool:
        workers = [
            worker for batch in self._batches if (worker := batch.worker_of(trajectory_id)) is not None
        ]
        for worker in workers:
            worker.cancel(trajectory_id)
        return bool(workers)

    def cancel_all(self) -> None:
        for worker in self._alive:
            worker.cancel_all()

    async def set_weight_version(self, weight_version: int) -> None:
        self._weight_version = weight_version
        await run_together(worker.set_weight_version(weight_version) for worker in self._alive)

    async def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.workers = ()

    # -- inside ----------------------------------------------------------------------------------------------------

    @property
    def _alive(self) -> list[RemoteWorker]:
        return [worker for worker in self.workers if worker.is_alive]

    async def _assign_jobs(self, batch: JobBatch, group: asyncio.TaskGroup) -> None:
        """Assign unassigned jobs to the workers that are alive, until the batch is complete."""
        clock = asyncio.get_running_loop().time
        waiting_since: float | None = None
        while not batch.is_complete:
            for chunk in batch.next_chunks(self._alive):
                group.create_task(self._run_chunk(chunk, batch))
            is_stuck = batch.num_unassigned > 0 and not self._alive
            waiting_since = (waiting_since or clock()) if is_stuck else None
            if waiting_since is not None and clock() - waiting_since > self._restart_timeout_s:
                raise RolloutError(
                    f"all {len(self.workers)} workers died, and none was restarted in {self._restart_timeout_s:g} s; "
                    f"{batch.num_unassigned} rows have not ended; see Ray's logs, or raise "
                    "trainer.ray.restart_timeout_s"
                )
            await batch.wait_for_change(timeout_s=RETRY_INTERVAL_S if is_stuck else None)

    async def _run_chunk(self, chunk: JobChunk, batch: JobBatch) -> None:
        worker, client = chunk.worker, chunk.worker.client
        try:
            async with aclosing(worker.run(chunk.jobs, weight_version=self._weight_version)) as updates:
                async for records, trajectories in updates:
                    await batch.keep(records)
                    batch.add(trajectories)
            batch.close(chunk)
        except ActorLost as error:
            is_first_report = worker.is_alive and worker.client == client
            worker.is_alive = worker.is_alive and not is_first_report
            num_left = await batch.put_back(chunk, max_restarts=self._max_row_restarts, reason=str(error))
            logger.warning("%s died (%s); other workers resume %d of its rows", worker.name, error, num_left)
            if is_first_report:
                await self._on_death(client)
                await self._restart(worker, batch)

    async def _restart(self, worker: RemoteWorker, batch: JobBatch) -> None:
        """Start a worker whose process Ray restarts. Retry until the batch is complete."""
        while not batch.is_complete:
            try:
                await worker.start()
            except ActorLost:
                await batch.wait_for_change(timeout_s=RETRY_INTERVAL_S)
            except AgentLoopError as error:
                logger.warning("%s could not be restarted: %s", worker.name, error)
                return
            else:
                logger.warning("%s was restarted", worker.name)
                batch.changed.set()
                return

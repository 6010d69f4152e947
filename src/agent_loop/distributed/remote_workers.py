"""All workers in other processes, as the driver sees them. A row whose worker dies is resumed by another worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from agent_loop.distributed.batch import Batch, Chunk
from agent_loop.distributed.ray_module import ActorLost
from agent_loop.distributed.remote_worker import RemoteWorker
from agent_loop.errors import AgentLoopError, RolloutError
from agent_loop.recording.row_log import RowLog
from agent_loop.recording.sink import Discard
from agent_loop.rollout.failures import FailureBudget
from agent_loop.rollout.jobs import Job
from agent_loop.runtime.concurrency import run_together
from agent_loop.trajectory import Trajectory

logger = logging.getLogger(__name__)

RETRY_EVERY_S = 0.5


def _recorded(job: Job) -> Job:
    """Return the job with a log, also where no journal is kept.

    The batch remembers what a row's worker recorded, so that the row's next worker resumes it, and does not repeat
    calls of tools with `on_replay: once`.
    """
    return job if job.log is not None else replace(job, log=RowLog(job.job_id, sink=Discard()))


class RemoteWorkers:
    """All workers of a run, in Ray actors. Implements `agent_loop.rollout.workers.Workers`."""

    def __init__(
        self,
        make_workers: Callable[[], Sequence[RemoteWorker]],
        *,
        on_death: Callable[[str], Awaitable[None]],
        restart_timeout_s: float,
        max_row_restarts: int,
    ) -> None:
        """Args:
        make_workers: Makes the actors; called by `start`, when the servers are up.
        on_death: Told the client's name of a worker that died, so that the servers free what it had there.
        restart_timeout_s: How long a batch waits for a worker while none is alive.
        max_row_restarts: A row that is run again so often, at last alone, and still loses its worker has failed.
        """
        self.workers: Sequence[RemoteWorker] = ()
        self._make_workers = make_workers
        self._on_death = on_death
        self._restart_timeout_s = restart_timeout_s
        self._max_row_restarts = max_row_restarts
        self._weight_version = 0
        self._batches: list[Batch] = []

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
        """As `Workers.run`. Raises: RolloutError: No worker is left, and none came back in time."""

        def note(trajectory: Trajectory) -> None:
            if on_trajectory is not None:
                on_trajectory(trajectory)
            if budget is not None:
                budget.count(trajectory)

        batch = Batch([_recorded(job) for job in jobs], note)
        self._batches.append(batch)
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self.workers:
                    if not worker.is_alive:
                        group.create_task(self._bring_back(worker, batch))
                await self._hand_out(batch, group)
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

    async def _hand_out(self, batch: Batch, group: asyncio.TaskGroup) -> None:
        """Shares what nobody runs among the workers that are alive, until the batch is complete."""
        clock = asyncio.get_running_loop().time
        waits_since: float | None = None
        while not batch.is_complete:
            for chunk in batch.next_chunks(self._alive):
                group.create_task(self._run_chunk(chunk, batch))
            nobody = batch.num_unassigned > 0 and not self._alive
            waits_since = (waits_since or clock()) if nobody else None
            if waits_since is not None and clock() - waits_since > self._restart_timeout_s:
                raise RolloutError(
                    f"all {len(self.workers)} workers died and none came back in {self._restart_timeout_s:g} s, with "
                    f"{batch.num_unassigned} rows to run; see Ray's logs, or raise trainer.ray.restart_timeout_s"
                )
            await batch.wait_for_change(timeout_s=RETRY_EVERY_S if nobody else None)

    async def _run_chunk(self, chunk: Chunk, batch: Batch) -> None:
        worker, client = chunk.worker, chunk.worker.client
        try:
            async with aclosing(worker.run(chunk.jobs, weight_version=self._weight_version)) as news:
                async for records, trajectories in news:
                    await batch.keep(records)
                    batch.add(trajectories)
            batch.close(chunk)
        except ActorLost as error:
            is_news = worker.is_alive and worker.client == client
            worker.is_alive = worker.is_alive and not is_news
            num_left = await batch.put_back(chunk, max_restarts=self._max_row_restarts, reason=str(error))
            logger.warning("%s is lost (%s); others go on with %d of its rows", worker.name, error, num_left)
            if is_news:
                await self._on_death(client)
                await self._bring_back(worker, batch)

    async def _bring_back(self, worker: RemoteWorker, batch: Batch) -> None:
        """Tries again and again, as long as there is something to do."""
        while not batch.is_complete:
            try:
                await worker.start()
            except ActorLost:
                await batch.wait_for_change(timeout_s=RETRY_EVERY_S)
            except AgentLoopError as error:
                logger.warning("%s did not come back: %s", worker.name, error)
                return
            else:
                logger.warning("%s is back", worker.name)
                batch.changed.set()
                return

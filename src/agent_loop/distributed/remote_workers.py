"""Workers in other processes, as the driver sees them. A row whose worker dies is gone on with by another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast
from uuid import uuid4

from agent_loop.distributed.batch import Batch, Chunk
from agent_loop.distributed.ray_module import ActorLost, answer_of, load_ray
from agent_loop.distributed.wire import unpack_trajectories
from agent_loop.distributed.worker_actor import WorkerSetup
from agent_loop.errors import AgentLoopError, RolloutError
from agent_loop.recording.row_log import RowLog
from agent_loop.recording.sink import Discard
from agent_loop.rollout.failures import FailureBudget
from agent_loop.rollout.jobs import Job
from agent_loop.runtime.concurrency import run_shielded, run_together
from agent_loop.trajectory import Trajectory

logger = logging.getLogger(__name__)

CANCEL_TIMEOUT_S = 30.0
RETRY_EVERY_S = 0.5


class RemoteWorker:
    """One worker actor."""

    def __init__(self, name: str, *, actor: Any, setup: WorkerSetup) -> None:
        self.name = name
        self.client = ""
        """Its name at the servers, which changes when it is started again."""
        self.pid = 0
        self.is_alive = False
        self._actor = actor
        self._setup = setup

    async def start(self) -> None:
        """Gets it ready, after a restart too.

        Raises:
            ActorLost: It is gone, or is just being started.
            AgentLoopError: It cannot load what the configuration names.
        """
        self.client, self.pid = await answer_of(self._actor.start.remote(self._setup))
        self.is_alive = True

    async def run(
        self, jobs: Sequence[Job], *, weight_version: int
    ) -> AsyncGenerator[tuple[Sequence[tuple[str, bytes]], list[Trajectory]]]:
        """Runs jobs and yields what comes: what was recorded of those that have logs, and trajectories that ended,
        those of one job together. Going on says that both are kept; leaving it ends the rest.

        Raises:
            ActorLost: The worker died.
        """
        client, run_id = self.client, uuid4().hex
        by_id = {job.place: job for job in jobs}
        bare = [replace(job, log=None) for job in jobs]
        records = {job.place: job.log.record for job in jobs if job.log is not None}
        running = self._actor.run.remote(client, run_id, bare, records, weight_version)
        is_over = False
        try:
            while not is_over:
                news = await answer_of(self._actor.take.remote(client, run_id))
                if news is None:
                    raise ActorLost("its process was started again")
                is_over = news.is_last
                yield news.records, unpack_trajectories(news.trajectories, jobs=by_id)
            await answer_of(running)
        except ActorLost:
            is_over = True
            raise
        finally:
            if not is_over:
                await run_shielded(partial(self._cancel_run, client, run_id), timeout_s=CANCEL_TIMEOUT_S)

    def cancel(self, trajectory_id: str) -> None:
        self._actor.cancel.remote(trajectory_id)

    def cancel_all(self) -> None:
        self._actor.cancel_all.remote()

    async def set_weight_version(self, weight_version: int) -> None:
        with suppress(ActorLost):
            await answer_of(self._actor.set_weight_version.remote(weight_version))

    def call(self, method: str) -> Any:
        """What a method of the actor will answer, for tests."""
        return getattr(self._actor, method).remote()

    def kill(self) -> None:
        self.is_alive = False
        load_ray().kill(self._actor)

    async def _cancel_run(self, client: str, run_id: str) -> None:
        with suppress(ActorLost):
            await answer_of(self._actor.cancel_run.remote(client, run_id))


def _recorded(job: Job) -> Job:
    """The job with a log: the batch remembers what a row's worker recorded, with a journal or without, so that the
    row's next worker resumes it and runs no call of an `on_replay: once` tool again."""
    return job if job.log is not None else replace(job, log=RowLog(job.place, sink=Discard()))


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
            nobody = batch.num_homeless > 0 and not self._alive
            waits_since = (waits_since or clock()) if nobody else None
            if waits_since is not None and clock() - waits_since > self._restart_timeout_s:
                raise RolloutError(
                    f"all {len(self.workers)} workers died and none came back in {self._restart_timeout_s:g} s, with "
                    f"{batch.num_homeless} rows to run; see Ray's logs, or raise trainer.ray.restart_timeout_s"
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

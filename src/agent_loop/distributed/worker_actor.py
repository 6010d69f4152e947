"""Ray actor of one worker."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from agent_loop.config import Config
from agent_loop.distributed.messages import ServerInfo, WorkerUpdate, pack_trajectories
from agent_loop.distributed.ray_module import enter_folder
from agent_loop.distributed.remote_server import RemoteServer
from agent_loop.recording.record import RowRecord
from agent_loop.recording.row_log import RowLog
from agent_loop.rollout.components import (
    load_context,
    load_loops,
    load_reward_function,
    load_template,
    make_server_manager,
    make_worker,
)
from agent_loop.rollout.jobs import Job
from agent_loop.rollout.worker import AgentLoopWorker
from agent_loop.runtime.concurrency import run_shielded, run_together, run_while
from agent_loop.runtime.isolated_task import DeadlineExpired
from agent_loop.runtime.user_code import run_bounded
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.pool import ServerPool
from agent_loop.trajectory import Trajectory

logger = logging.getLogger(__name__)

UPDATE_INTERVAL_S = 0.02
SEND_WITHIN_S = 0.5
"""Seconds that records wait for another message to travel with. They are lost if the worker dies before."""
FLUSH_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """Arguments of a worker, which is created from them each time its process starts."""

    config: Config
    servers: tuple[tuple[Any, ServerInfo], ...]
    """Handles of server actors, and what the servers offer."""
    index: int
    """Index of the worker. Each worker lists the servers from another first server on."""
    folder: str
    """Working directory of the driver."""


class JobRun:
    """Jobs of a batch that the worker runs: what the driver has to know, until it has fetched and stored it."""

    def __init__(self) -> None:
        self.has_update = asyncio.Event()
        self.is_cancelled = asyncio.Event()
        self.is_over = asyncio.Event()
        self._ended: list[Trajectory] = []
        self._records: list[tuple[str, bytes]] = []
        self._num_records = 0
        self._num_sent = 0
        self._num_stored = 0
        self._is_stored = asyncio.Condition()
        self._timer: asyncio.TimerHandle | None = None
        self._updated_at = -math.inf

    def add(self, trajectory: Trajectory) -> None:
        """Add a trajectory that ended. The trajectories of one job are added without a pause."""
        self._ended.append(trajectory)
        self.has_update.set()

    def add_record(self, trajectory_id: str, payload: bytes) -> None:
        """Add a journal record, which waits up to `SEND_WITHIN_S` for others to travel with."""
        self._records.append((trajectory_id, payload))
        self._num_records += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SEND_WITHIN_S, self.has_update.set)

    async def stored(self) -> None:
        """Wait until the driver has stored all records so far."""
        num_records = self._num_records
        if self._num_sent < num_records:
            self.has_update.set()
        async with self._is_stored:
            await self._is_stored.wait_for(lambda: self._num_stored >= num_records)

    async def next_update(self) -> WorkerUpdate:
        """Wait for something to report, and return everything since the last update, which the driver has stored.

        Updates are at least `UPDATE_INTERVAL_S` apart, except the last one.
        """
        self._num_stored = self._num_sent
        async with self._is_stored:
            self._is_stored.notify_all()
        await self.has_update.wait()
        clock = asyncio.get_running_loop().time
        if (wait_s := self._updated_at + UPDATE_INTERVAL_S - clock()) > 0:
            with suppress(DeadlineExpired):
                await run_bounded(self.is_over.wait, timeout_s=wait_s)
        self._updated_at = clock()
        self.has_update.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ended, self._ended = self._ended, []
        records, self._records = self._records, []
        self._num_sent += len(records)
        return WorkerUpdate(pack_trajectories(ended), records, is_last=self.is_over.is_set())


@dataclass(frozen=True, slots=True)
class RowRecordSink:
    """Sink of one row's log. Implements `agent_loop.recording.record.Sink`."""

    run: JobRun
    trajectory_id: str

    def append(self, payload: bytes) -> None:
        self.run.add_record(self.trajectory_id, payload)

    async def flushed(self, *, to_disk: bool = False) -> None:
        """Wait until the driver has stored the records. Its operating system has them then, not yet its disk."""
        await self.run.stored()


class WorkerActor:
    """Owns one `AgentLoopWorker` and its clients of the servers.

    Each worker balances its own sessions over all servers. Responses report how busy a server is with other clients.
    """

    def __init__(self) -> None:
        self._client = ""
        self._servers: Sequence[RemoteServer] = ()
        self._pool = ServerPool(())
        self._worker: AgentLoopWorker | None = None
        self._manager: AsyncLLMServerManager | None = None
        self._runs: dict[str, JobRun] = {}

    async def start(self, setup: WorkerSetup) -> tuple[str, int]:
        """Load the components that the configuration names.

        If the process was started before and survived, its runs are cancelled first.

        Returns:
            The worker's client name at the servers, which is new each time, and the id of the process.

        Raises:
            AgentLoopError: A component cannot be loaded.
        """
        for run_id in list(self._runs):
            await self.cancel_run(self._client, run_id)
        await run_together(server.close() for server in self._servers)
        enter_folder(setup.folder)
        rollout = setup.config.rollout
        self._client = f"worker-{setup.index}/{uuid4().hex}"
        self._servers = self._remote_servers(setup)
        template = load_template(setup.config)
        self._manager = make_server_manager(rollout, self._servers, vocab_size=template.vocab_size)
        self._pool = self._manager.pool
        context = load_context(
            rollout,
            server_manager=self._manager,
            template=template,
            settings=setup.config,
        )
        # The driver scores whole groups, so that no worker loads the dependencies of the reward function.
        reward = None if setup.config.reward.batch else load_reward_function(setup.config)
        self._worker = make_worker(rollout, context=context, loops=load_loops(rollout), reward=reward)
        gc.freeze()  # full collections need not scan libraries
        return self._client, os.getpid()

    async def run(
        self,
        client: str,
        run_id: str,
        jobs: Sequence[Job],
        records: Mapping[str, RowRecord],
        weight_version: int,
    ) -> None:
        """Run jobs until they end. `fetch_update` returns their trajectories, and new records of jobs with records.

        Ray may start the two calls in any order. Both do nothing if the process was restarted since, and `client` is
        not the worker's name any more.
        """
        if client != self._client or self._worker is None or self._manager is None:
            return
        run = self._runs.setdefault(run_id, JobRun())
        self._pool.weight_version = weight_version
        jobs = [_with_log(job, records, run) for job in jobs]
        try:
            async with self._manager.pool.watching():
                running = self._worker.run(jobs, on_trajectory=run.add)
                await run_while(running, condition=run.is_cancelled.wait())
        finally:
            try:
                await run_shielded(self._flush_servers, timeout_s=FLUSH_TIMEOUT_S)
            except TimeoutError:
                logger.warning(
                    "a server did not confirm within %g s that it ended this run's sessions", FLUSH_TIMEOUT_S
                )
            finally:
                run.is_over.set()
                run.has_update.set()

    async def fetch_update(self, client: str, run_id: str) -> WorkerUpdate | None:
        """Wait for an update of a run, and return it. The call confirms that the driver stored the previous update.

        Returns None if the process was restarted, and `client` is not the worker's name any more.
        """
        if client != self._client:
            return None
        update = await self._runs.setdefault(run_id, JobRun()).next_update()
        if update.is_last:
            self._runs.pop(run_id, None)
        return update

    async def cancel_run(self, client: str, run_id: str) -> None:
        """Cancel a run, and wait until all of it has ended."""
        if client == self._client:
            run = self._runs.setdefault(run_id, JobRun())
            run.is_cancelled.set()
            await run.is_over.wait()
            self._runs.pop(run_id, None)

    async def cancel(self, trajectory_id: str) -> None:
        if self._worker is not None:
            self._worker.cancel(trajectory_id)

    async def cancel_all(self) -> None:
        if self._worker is not None:
            self._worker.cancel_all()

    async def set_weight_version(self, weight_version: int) -> None:
        self._pool.weight_version = weight_version

    async def inspect(self) -> dict[str, int]:
        """Return counts of what is held, for tests. All are zero between batches; empty if `start` was not called."""
        if self._worker is None:
            return {}
        balancer = self._pool.balancer
        return {
            "leases": balancer.num_leases,
            "waiting": balancer.num_queued,
            "sessions": balancer.num_sessions,
            "running": len(self._worker.running),
            "runs": len(self._runs),
            "tasks": len(asyncio.all_tasks()) - 1,
        }

    async def _flush_servers(self) -> None:
        """Wait until all servers have ended the sessions that ended here."""
        await run_together(server.flush(is_lost=server.name in self._pool.lost) for server in self._servers)

    def _remote_servers(self, setup: WorkerSetup) -> list[RemoteServer]:
        num_workers = setup.config.rollout.agent.num_workers
        first = setup.index % max(len(setup.servers), 1)
        return [
            RemoteServer(
                actor,
                client=self._client,
                info=replace(
                    info,
                    max_concurrent=None
                    if info.max_concurrent is None
                    else -(-info.max_concurrent // num_workers),
                ),
                on_other_requests=self._note_other_requests,
            )
            for actor, info in [*setup.servers[first:], *setup.servers[:first]]
        ]

    def _note_other_requests(self, server: str, num_requests: int) -> None:
        self._pool.balancer.set_external_requests(server, num_requests)


def _with_log(job: Job, records: Mapping[str, RowRecord], run: JobRun) -> Job:
    record = records.get(job.job_id)
    if record is None:
        return job
    return replace(job, log=RowLog(job.job_id, sink=RowRecordSink(run, job.job_id), record=record))

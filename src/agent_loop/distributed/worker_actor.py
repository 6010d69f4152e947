"""Ray actor of one worker."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from agent_loop.config import Config
from agent_loop.distributed.messages import ServerInfo, WorkerUpdate, pack_trajectories
from agent_loop.distributed.ray_module import ActorLost, enter_folder
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
from agent_loop.runtime.concurrency import run_shielded, run_together
from agent_loop.servers.pool import ServerPool
from agent_loop.trajectory import Trajectory

logger = logging.getLogger(__name__)

UPDATE_INTERVAL_S = 0.02
"""Seconds between two messages, in which trajectories and records gather."""
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


@dataclass(frozen=True, slots=True)
class Report:
    """Contents of one message to the driver."""

    trajectories: list[Trajectory] = field(default_factory=list[Trajectory])
    records: list[tuple[str, bytes]] = field(default_factory=list[tuple[str, bytes]])
    is_stored: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the driver has stored the records."""


class JobRun:
    """Jobs of a batch that the worker runs, and what it reports about them."""

    def __init__(self) -> None:
        self._next = Report()
        self._sent: deque[Report] = deque()
        """Reports that the driver has not confirmed, oldest first."""
        self._has_report = asyncio.Event()
        self._is_over = asyncio.Event()

    def add(self, trajectory: Trajectory) -> None:
        """Add a trajectory that ended. The trajectories of one job are added without a pause."""
        self._next.trajectories.append(trajectory)
        self._has_report.set()

    def add_record(self, trajectory_id: str, payload: bytes) -> None:
        """Add a journal record."""
        self._next.records.append((trajectory_id, payload))
        self._has_report.set()

    def end(self) -> None:
        """Report that all jobs have ended."""
        self._is_over.set()
        self._has_report.set()

    async def stored(self) -> None:
        """Wait until the driver has stored all records so far."""
        reports = [self._next] if self._next.records else list(self._sent)
        if reports:
            await reports[-1].is_stored.wait()

    def confirm(self) -> None:
        """Note that the driver has stored one more report."""
        self._sent.popleft().is_stored.set()

    async def updates(self) -> AsyncGenerator[WorkerUpdate]:
        """Yield what the driver has to know until all jobs have ended."""
        is_last = False
        while not is_last:
            await self._has_report.wait()
            self._has_report.clear()
            is_last = self._is_over.is_set()
            report, self._next = self._next, Report()
            self._sent.append(report)
            yield WorkerUpdate(pack_trajectories(report.trajectories), report.records)
            with suppress(TimeoutError):
                async with asyncio.timeout(UPDATE_INTERVAL_S):
                    await self._is_over.wait()


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
        self._runs: dict[str, tuple[JobRun, asyncio.Task[None]]] = {}

    async def start(self, setup: WorkerSetup) -> tuple[str, int]:
        """Load the components that the configuration names.

        If the process was started before and survived, its runs are cancelled first.

        Returns:
            The worker's client name at the servers, which is new each time, and the id of the process.

        Raises:
            AgentLoopError: A component cannot be loaded.
        """
        for run_id in list(self._runs):
            await self.end_run(run_id)
        await run_together(server.close() for server in self._servers)
        enter_folder(setup.folder)
        rollout = setup.config.rollout
        self._client = f"worker-{setup.index}/{uuid4().hex}"
        self._servers = self._remote_servers(setup)
        template = load_template(setup.config)
        manager = make_server_manager(rollout, self._servers, vocab_size=template.vocab_size)
        self._pool = manager.pool
        context = load_context(
            rollout,
            server_manager=manager,
            template=template,
            settings=setup.config,
        )
        # The driver scores whole groups, so that no worker loads the dependencies of the reward function.
        reward = None if setup.config.reward.batch else load_reward_function(setup.config)
        self._worker = make_worker(rollout, context=context, loops=load_loops(rollout), reward=reward)
        gc.freeze()  # full collections need not scan libraries
        return self._client, os.getpid()

    async def run(
        self, run_id: str, jobs: Sequence[Job], records: Mapping[str, RowRecord], weight_version: int
    ) -> AsyncGenerator[WorkerUpdate]:
        """Run jobs, and yield their trajectories, and new records of jobs with records, until all have ended.

        The caller confirms each update with `confirm`, once it is stored.
        """
        if self._worker is None:
            raise ActorLost("its process was restarted")
        run = JobRun()
        self._pool.weight_version = weight_version
        running = asyncio.create_task(self._run_jobs([_with_log(job, records, run) for job in jobs], run))
        self._runs[run_id] = run, running
        try:
            async with aclosing(run.updates()) as updates:
                async for update in updates:
                    yield update
            await running
        finally:
            await self.end_run(run_id)

    async def end_run(self, run_id: str) -> None:
        """Cancel a run, and wait until all of it has ended.

        The caller does so after it cancelled the call of `run`, which Ray may leave where it last yielded.
        """
        if run_id in self._runs:
            _, running = self._runs[run_id]
            running.cancel()
            await asyncio.wait({running})
            self._runs.pop(run_id, None)

    async def confirm(self, run_id: str) -> None:
        """Confirm that the oldest update of a run that was not confirmed is stored."""
        if run_id in self._runs:
            self._runs[run_id][0].confirm()

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

    async def _run_jobs(self, jobs: Sequence[Job], run: JobRun) -> None:
        assert self._worker is not None
        try:
            async with self._pool.watching():
                await self._worker.run(jobs, on_trajectory=run.add)
        finally:
            try:
                await run_shielded(self._flush_servers, timeout_s=FLUSH_TIMEOUT_S)
            except TimeoutError:
                logger.warning(
                    "a server did not confirm within %g s that it ended this run's sessions", FLUSH_TIMEOUT_S
                )
            finally:
                run.end()

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

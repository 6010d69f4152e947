"""A worker in a process of its own: what runs inside its Ray actor."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from agent_loop.config import Config
from agent_loop.distributed.ray_module import enter_folder
from agent_loop.distributed.relay import Relay
from agent_loop.distributed.remote_server import RemoteServer
from agent_loop.distributed.wire import News, ServerFacts, pack_trajectories
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
from agent_loop.runtime.concurrency import run_shielded, run_together, run_until
from agent_loop.runtime.garbage_collection import freeze_objects
from agent_loop.runtime.isolated_task import DeadlineExpired
from agent_loop.runtime.user_code import run_bounded
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.pool import ServerPool
from agent_loop.trajectory import Trajectory

logger = logging.getLogger(__name__)

NUM_CALLS = 1000
NEWS_EVERY_S = 0.02
SETTLE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """What a worker is made from, each time its process is started."""

    config: Config
    servers: tuple[tuple[Any, ServerFacts], ...]
    """Handles of server actors, and what they are."""
    index: int
    """Of this worker; each begins with another server."""
    folder: str
    """Where the driver was started."""


class _Run:
    """Some jobs of a batch."""

    def __init__(self) -> None:
        self.has_news = asyncio.Event()
        self.is_cancelled = asyncio.Event()
        self.is_over = asyncio.Event()
        self.relay = Relay(self.has_news.set)
        self._ended: list[Trajectory] = []
        self._told_at = -math.inf

    def add(self, trajectory: Trajectory) -> None:
        """Those of one job are added together."""
        self._ended.append(trajectory)
        self.has_news.set()

    async def news(self) -> News:
        """What there is since the last time, as soon as there is something; but not too often before the end."""
        self.relay.confirm()
        await self.has_news.wait()
        clock = asyncio.get_running_loop().time
        if (wait_s := self._told_at + NEWS_EVERY_S - clock()) > 0:
            with suppress(DeadlineExpired):
                await run_bounded(self.is_over.wait, timeout_s=wait_s)
        self._told_at = clock()
        self.has_news.clear()
        ended, self._ended = self._ended, []
        return News(pack_trajectories(ended), self.relay.fetch(), is_last=self.is_over.is_set())


class WorkerActor:
    """Owns one `AgentLoopWorker` and its view of the servers.

    Each worker balances its own sessions over all servers: their answers tell it how busy they are with others.
    """

    def __init__(self) -> None:
        self._client = ""
        self._servers: Sequence[RemoteServer] = ()
        self._pool = ServerPool(())
        self._worker: AgentLoopWorker | None = None
        self._manager: AsyncLLMServerManager | None = None
        self._runs: dict[str, _Run] = {}

    async def start(self, setup: WorkerSetup) -> tuple[str, int]:
        """Loads what the configuration names. A worker that was given up, but lives, ends what it ran.

        Returns:
            The client's name at the servers, which is another one each time, and the process's id.

        Raises:
            AgentLoopError: It cannot be loaded.
        """
        for run_id in list(self._runs):
            await self.cancel_run(self._client, run_id)
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
        # Whole groups are scored by the driver, so that no worker loads what only the function needs.
        reward = None if setup.config.reward.batch else load_reward_function(setup.config)
        self._worker = make_worker(rollout, context=context, loops=load_loops(rollout), reward=reward)
        freeze_objects()
        return self._client, os.getpid()

    async def run(
        self,
        client: str,
        run_id: str,
        jobs: Sequence[Job],
        records: Mapping[str, RowRecord],
        weight_version: int,
    ) -> None:
        """Runs jobs to their ends; `take` hands out what ended, and what was recorded of the jobs that have records.

        Ray may start the two in any order. Both do nothing for a client that is no more: the process was started
        again since.
        """
        if client != self._client or self._worker is None or self._manager is None:
            return
        run = self._runs.setdefault(run_id, _Run())
        self._pool.weight_version = weight_version
        jobs = [_logged(job, records, run.relay) for job in jobs]
        try:
            async with self._manager.watching():
                await run_until(self._worker.run(jobs, on_trajectory=run.add), run.is_cancelled)
        finally:
            try:
                await run_shielded(self._settle, timeout_s=SETTLE_TIMEOUT_S)
            except TimeoutError:
                logger.warning("a server did not hear in %g s which sessions ended", SETTLE_TIMEOUT_S)
            finally:
                run.is_over.set()
                run.has_news.set()

    async def take(self, client: str, run_id: str) -> News | None:
        """What there is since the last time, as soon as there is something; to ask is to say that what was taken
        before is kept. None if the client is no more."""
        if client != self._client:
            return None
        news = await self._runs.setdefault(run_id, _Run()).news()
        if news.is_last:
            self._runs.pop(run_id, None)
        return news

    async def cancel_run(self, client: str, run_id: str) -> None:
        """Ends a run; when this returns, nothing of it is left."""
        if client == self._client:
            run = self._runs.setdefault(run_id, _Run())
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
        """What is held, for tests: all zero between batches, and nothing in a process that was just started again."""
        if self._worker is None:
            return {}
        balancer = self._pool.balancer
        return {
            "leases": balancer.num_leases,
            "waiting": balancer.num_waiting,
            "sessions": balancer.num_sessions,
            "running": len(self._worker.running),
            "runs": len(self._runs),
            "tasks": len(asyncio.all_tasks()) - 1,
        }

    async def _settle(self) -> None:
        """Has the servers hear what they were not told yet: which sessions ended."""
        await run_together(server.settled() for server in self._servers if server.name not in self._pool.lost)

    def _remote_servers(self, setup: WorkerSetup) -> list[RemoteServer]:
        share = setup.config.rollout.agent.num_workers
        first = setup.index % max(len(setup.servers), 1)
        return [
            RemoteServer(
                actor,
                client=self._client,
                facts=replace(
                    facts,
                    max_concurrent=None
                    if facts.max_concurrent is None
                    else -(-facts.max_concurrent // share),
                ),
                on_other_requests=self._note_other_requests,
            )
            for actor, facts in [*setup.servers[first:], *setup.servers[:first]]
        ]

    def _note_other_requests(self, server: str, num_requests: int) -> None:
        self._pool.balancer.set_outside_requests(server, num_requests)


def _logged(job: Job, records: Mapping[str, RowRecord], relay: Relay) -> Job:
    record = records.get(job.job_id)
    if record is None:
        return job
    sink = relay.sink(job.job_id)
    return replace(job, log=RowLog(job.job_id, sink=sink, record=record))

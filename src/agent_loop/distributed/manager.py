"""The manager whose servers and workers are Ray actors."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Self

from agent_loop.chat.verify import require_template
from agent_loop.config import Config
from agent_loop.distributed.cluster import Cluster
from agent_loop.distributed.remote_server import OwnedServer
from agent_loop.distributed.remote_worker import RemoteWorker
from agent_loop.distributed.remote_workers import RemoteWorkers
from agent_loop.distributed.weights import WeightStore
from agent_loop.errors import ServerError
from agent_loop.planning.devices import Assignment
from agent_loop.rollout.components import load_reward_function, load_template
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.runtime.concurrency import run_together
from agent_loop.servers.factory import make_server_specs
from agent_loop.tracing.tracer import with_trace_names

START_GRACE_S = 60.0
"""Seconds for Ray to schedule the actor, in addition to `rollout.start_timeout_s`, which limits the engine's start."""


class ClusterManager(AgentLoopManager):
    """An `AgentLoopManager` on a Ray cluster. Processes that die are restarted."""

    def __init__(self, config: Config) -> None:
        """Create a manager. Nothing is started yet."""
        rollout, ray = config.rollout, config.trainer.ray
        template = load_template(config)
        require_template(template, tools=rollout.multi_turn.has_tools)
        self.cluster = Cluster(config)
        store = WeightStore()
        self.remote_servers = [
            OwnedServer(
                spec.name,
                make_actor=partial(self.cluster.make_server, spec, index=index),
                store=store,
                start_timeout_s=rollout.start_timeout_s + START_GRACE_S,
            )
            for index, spec in enumerate(
                make_server_specs(
                    config.model,
                    rollout=rollout,
                    placement=config.placement,
                    assignment=Assignment(is_colocated=config.placement.colocated is not None),
                )
            )
        ]
        self.remote_workers = RemoteWorkers(
            self._make_workers,
            on_death=self._drop_client,
            restart_timeout_s=ray.restart_timeout_s,
            max_row_restarts=ray.max_row_restarts,
        )
        super().__init__(
            with_trace_names(config),
            servers=self.remote_servers,
            template=template,
            reward=load_reward_function(config) if config.reward.batch else None,
            workers=self.remote_workers,
            settings=config,
        )

    @classmethod
    def from_config(cls, config: Config) -> Self:
        return cls(config)

    async def start(self) -> None:
        self.cluster.connect()
        try:
            await super().start()
        except BaseException:
            self.cluster.disconnect()
            raise

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            self.cluster.disconnect()

    def _make_workers(self) -> list[RemoteWorker]:
        return self.cluster.make_workers([(server.actor, server.info) for server in self.remote_servers])

    async def _drop_client(self, client: str) -> None:
        """Free the sessions and requests of a dead worker at all servers. Servers that are lost are skipped."""

        async def drop(server: OwnedServer) -> None:
            with suppress(ServerError):
                await server.drop_client(client)

        await run_together(drop(server) for server in self.remote_servers)

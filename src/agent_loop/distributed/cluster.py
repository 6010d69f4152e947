"""The Ray cluster of a run: the one that is there, or one of our own."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from agent_loop.config import Config
from agent_loop.distributed.placement import Node, place_servers
from agent_loop.distributed.ray_module import load_ray, on_loopback
from agent_loop.distributed.remote_worker import RemoteWorker
from agent_loop.distributed.server_actor import (
    CONTROL_GROUP,
    NUM_COMPLETIONS,
    NUM_CONTROL_CALLS,
    ServerActor,
)
from agent_loop.distributed.wire import ServerFacts
from agent_loop.distributed.worker_actor import NUM_CALLS, WorkerActor, WorkerSetup
from agent_loop.errors import ConfigError
from agent_loop.runtime.describe import describe_error
from agent_loop.servers.base import ServerSpec

FOR_EVER: dict[str, Any] = {"max_restarts": -1, "max_task_retries": 0}
"""Ray starts a process again; what it was doing is for us to repeat, or not."""


class Cluster:
    """Makes actors; connects to Ray before and disconnects behind."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._ray_config = config.trainer.ray
        self._ray = load_ray()
        self._is_ours = False
        self._server_nodes: list[str | None] = []

    def connect(self) -> None:
        """Joins the cluster that `trainer.ray.address` names, or starts one. Where this process has joined one before,
        that one is used.

        Raises:
            ConfigError: There is none.
        """
        if not self._ray.is_initialized():
            options: dict[str, Any] = {"address": self._ray_config.address}
            host = self._ray_config.host
            is_local = self._ray_config.address is None
            if is_local:
                # What telemetry there is, is for whoever runs a cluster to decide.
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
                options = {"address": "local", "num_cpus": self._num_cpus, "include_dashboard": False}
                if host is not None:
                    options["_node_ip_address"] = host
            if self._ray_config.runtime_env:
                options["runtime_env"] = self._ray_config.runtime_env
            try:
                with on_loopback() if is_local and host is None else nullcontext():
                    self._ray.init(**options)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(
                    f"no Ray cluster at trainer.ray.address {self._ray_config.address!r}: {describe_error(error)}"
                ) from error
            self._is_ours = True
        rollout, cpus = self._config.rollout, self._ray_config.num_cpus_per_server
        self._server_nodes = place_servers(
            len(rollout.server_urls) or rollout.num_servers,
            nodes=[
                Node(node["NodeID"], node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0))
                for node in self._ray.nodes()
                if node["Alive"]
            ],
            num_cpus=cpus,
            num_gpus=self._ray_config.num_gpus_per_server,
        )

    def disconnect(self) -> None:
        """Leaves the cluster, and ends it if it was started here."""
        if self._is_ours:
            self._is_ours = False
            self._ray.shutdown()

    def make_server(self, spec: ServerSpec, *, index: int) -> Any:
        """The actor of a server: on a node that has what it needs, and there again after a restart if it can."""
        node = self._server_nodes[index]
        strategy: Any = "SPREAD"
        if node is not None:
            strategies: Any = self._ray.util.scheduling_strategies
            strategy = strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=True)
        actor_class = self._ray.remote(
            num_cpus=self._ray_config.num_cpus_per_server,
            num_gpus=self._ray_config.num_gpus_per_server,
            max_concurrency=NUM_COMPLETIONS,
            concurrency_groups={CONTROL_GROUP: NUM_CONTROL_CALLS},
            scheduling_strategy=strategy,
            **FOR_EVER,
        )(ServerActor)
        return actor_class.remote(spec, rollout=self._config.rollout, folder=os.getcwd())

    def make_workers(self, servers: Sequence[tuple[Any, ServerFacts]]) -> list[RemoteWorker]:
        """The workers' actors, spread over the nodes."""
        actor_class = self._ray.remote(
            num_cpus=self._ray_config.num_cpus_per_worker,
            max_concurrency=NUM_CALLS,
            scheduling_strategy="SPREAD",
            **FOR_EVER,
        )(WorkerActor)
        return [
            RemoteWorker(
                f"worker-{index}",
                actor=actor_class.remote(),
                setup=WorkerSetup(self._config, tuple(servers), index, folder=os.getcwd()),
            )
            for index in range(self._config.rollout.agent.num_workers)
        ]

    @property
    def _num_cpus(self) -> int:
        """Of a cluster of our own: Ray's CPUs are tickets, so there are enough for all actors."""
        rollout, ray = self._config.rollout, self._ray_config
        wanted = (
            rollout.num_servers * ray.num_cpus_per_server
            + rollout.agent.num_workers * ray.num_cpus_per_worker
            + (self._config.trainer.num_processes - 1) * ray.num_cpus_per_learner
        )
        return max(os.cpu_count() or 1, math.ceil(wanted))

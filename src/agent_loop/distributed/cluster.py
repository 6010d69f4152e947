"""Ray cluster of a run: an existing cluster, or a cluster that the run starts."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from agent_loop.config import Config, RolloutConfig
from agent_loop.distributed.device_group import (
    create_group,
    gpus_per_server,
    remove_group,
    strategy_for,
)
from agent_loop.distributed.messages import ServerInfo
from agent_loop.distributed.ray_module import load_ray, on_loopback
from agent_loop.distributed.remote_worker import RemoteWorker
from agent_loop.distributed.server_actor import NUM_CALLS, ServerActor
from agent_loop.distributed.worker_actor import WorkerActor, WorkerSetup
from agent_loop.errors import ConfigError
from agent_loop.runtime.describe import describe_error
from agent_loop.servers.base import AsyncServerBase, ServerSpec
from agent_loop.servers.factory import create_server, find_server_class

RESTART_OPTIONS: dict[str, Any] = {"max_restarts": -1, "max_task_retries": 0}
"""Ray restarts processes without limit, and repeats no calls."""


class Cluster:
    """Connection to Ray that creates the actors of a run."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._ray_config = config.trainer.ray
        self._ray = load_ray()
        self._is_started_here = False

    def connect(self) -> None:
        """Connect to the cluster at `trainer.ray.address`, or start a cluster if no address is set.

        A process that is connected to Ray already keeps its connection.
        """
        if not self._ray.is_initialized():
            options: dict[str, Any] = {"address": self._ray_config.address}
            host = self._ray_config.host
            is_local = self._ray_config.address is None
            if is_local:
                # Only the operator of a cluster should switch Ray's telemetry on.
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
            self._is_started_here = True
        if self._config.placement.is_set:
            create_group(self._ray, self._config)

    def disconnect(self) -> None:
        """Disconnect, and stop the cluster if `connect` started it."""
        if self._config.placement.is_set and self._ray.is_initialized():
            remove_group(self._ray)
        if self._is_started_here:
            self._is_started_here = False
            self._ray.shutdown()

    def make_server(self, spec: ServerSpec, *, index: int) -> Any:
        """Create the actor of a server. Ray spreads servers over the nodes that have the resources."""
        is_placed = self._config.placement.is_set
        actor_class = self._ray.remote(
            num_cpus=self._ray_config.num_cpus_per_server,
            num_gpus=self._num_gpus_per_server,
            max_concurrency=NUM_CALLS,
            scheduling_strategy=strategy_for(self._ray, bundle=index) if is_placed else "SPREAD",
            **RESTART_OPTIONS,
        )(ServerActor)
        make = partial(_make_server, self._config.rollout, spec)
        return actor_class.remote(make, name=spec.name, folder=os.getcwd())

    def make_workers(self, servers: Sequence[tuple[Any, ServerInfo]]) -> list[RemoteWorker]:
        """Create the actors of the workers, spread over the nodes."""
        actor_class = self._ray.remote(
            num_cpus=self._ray_config.num_cpus_per_worker,
            max_concurrency=NUM_CALLS,
            scheduling_strategy="SPREAD",
            **RESTART_OPTIONS,
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
    def _num_gpus_per_server(self) -> float:
        has_gpus = self._ray.cluster_resources().get("GPU", 0.0) > 0
        return gpus_per_server(self._config, has_gpus=has_gpus)

    @property
    def _num_cpus(self) -> int:
        """CPUs of a cluster that the run starts. Ray only counts CPUs, so this is enough for all actors."""
        rollout, ray = self._config.rollout, self._ray_config
        wanted = (
            rollout.num_servers * ray.num_cpus_per_server
            + rollout.agent.num_workers * ray.num_cpus_per_worker
            + self._config.trainer.num_processes * ray.num_cpus_per_learner
        )
        return max(os.cpu_count() or 1, math.ceil(wanted))


def _make_server(rollout: RolloutConfig, spec: ServerSpec) -> AsyncServerBase:
    """Create a server. Called in the actor's process, in which the class may be a file of the user."""
    return create_server(find_server_class(rollout), spec)

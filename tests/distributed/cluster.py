"""Ray cluster of several nodes on this machine, a manager on it, and faults for both."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from agent_loop.config import Config
from agent_loop.distributed.manager import ClusterManager
from agent_loop.distributed.ray_module import ActorLost, await_result
from agent_loop.runtime.concurrency import run_together
from agent_loop.trajectory import Trajectory
from tests.distributed.project import rows

ray: Any = None
with suppress(ImportError):  # the tests that need it are marked `ray`
    import ray

NODE = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False}
HEAD = {**NODE, "num_cpus": 1}


@contextmanager
def cluster_of(num_nodes: int) -> Generator[Any]:
    """Start a cluster with `num_nodes` nodes in addition to the driver's node."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    try:
        for _ in range(num_nodes):
            cluster.add_node(**NODE)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


class ClusterHarness:
    """Manager that has started, and its event loop."""

    def __init__(self, config: Config, *, folder: Path, cluster: Any) -> None:
        self.folder = folder
        self.cluster = cluster
        self.manager = ClusterManager(config)
        self.runner = asyncio.Runner()

    def __enter__(self) -> ClusterHarness:
        self.runner.run(self.manager.start())
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.run(self.manager.close())
        self.runner.close()

    async def run(
        self, work: list[Any], *, breaks: Any = None, after: int = 0, **options: Any
    ) -> list[Trajectory]:
        """Run rows, and await `breaks()` once `after` trajectories have ended."""
        enough = asyncio.Event()
        num_ended = 0

        def note(_: Trajectory) -> None:
            nonlocal num_ended
            num_ended += 1
            if num_ended >= after:
                enough.set()

        async def break_it() -> None:
            await enough.wait()
            if breaks is not None:
                await breaks()

        async with asyncio.TaskGroup() as group:
            running = group.create_task(self.manager.run(work, on_trajectory=note, **options))
            breaking = group.create_task(break_it())
            await asyncio.wait({running})
            breaking.cancel()
        return running.result()

    # -- faults ----------------------------------------------------------------------------------------------------

    async def kill_server(self, index: int = 0) -> None:
        await self._kill(self.manager.remote_servers[index].actor)

    async def kill_worker(self, index: int = 0) -> None:
        with suppress(ProcessLookupError):  # already dead
            os.kill(self.manager.remote_workers.workers[index].pid, signal.SIGKILL)

    async def kill_node(self) -> None:
        """Kill a node and all its processes with SIGKILL."""
        victim = self.cluster.list_all_nodes()[-1]
        self.cluster.remove_node(victim, allow_graceful=False)

    async def _kill(self, actor: Any) -> None:
        with suppress(ActorLost, ProcessLookupError):  # already dead
            os.kill(await await_result(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)

    async def recovered(self) -> None:
        """Run small batches until all killed processes have been restarted."""
        while not self.is_whole:
            await self.manager.run(rows(8))

    @property
    def is_whole(self) -> bool:
        manager = self.manager
        num_servers = len(manager.server_manager.pool.balancer.servers)
        return num_servers == len(manager.remote_servers) and all(
            worker.is_alive for worker in manager.remote_workers.workers
        )

    # -- cleanup ---------------------------------------------------------------------------------------------------

    async def held(self) -> dict[str, int]:
        """Return counts of what servers and workers hold. All are zero between batches."""

        async def of(name: str, call: Any) -> dict[str, int]:
            try:
                return {f"{name}/{key}": count for key, count in (await await_result(call)).items()}
            except ActorLost:
                return {}

        parts = await run_together(
            [
                *(of(server.name, server.actor.inspect.remote()) for server in self.manager.remote_servers),
                *(of(w.name, w.call("inspect")) for w in self.manager.remote_workers.workers if w.is_alive),
            ]
        )
        return {name: count for part in parts for name, count in part.items()}

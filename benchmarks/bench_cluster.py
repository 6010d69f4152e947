"""CPU time on a Ray cluster, relative to one process, with the balancer in the workers or in one actor.

    python benchmarks/bench_cluster.py [--rows 400] [--sessions 400]

Needs `pip install "agent-loop[ray]"`. Servers are scripted. CPU time includes all child processes and Ray's own
processes. The ratios are more reliable than the absolute times.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from overhead.processes import tree_cpu_seconds
from rich.console import Console
from rich.table import Table

from agent_loop.config import Config, parse_section
from agent_loop.distributed import create_manager
from agent_loop.distributed.remote_server import RemoteServer
from agent_loop.distributed.server_actor import CONTROL_GROUP, ServerActor
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.runtime.concurrency import run_together, running_in_background
from agent_loop.servers.balancer import LoadBalancer, SlotRequest
from agent_loop.servers.base import ServerSpec
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.pool import ServerPool
from agent_loop.types import SamplingParams
from tests.distributed.project import make_config as make_project_config
from tests.distributed.project import make_project, rows

NUM_SERVERS = 4
NUM_WORKERS = 4
NUM_TURNS = 3
TOKENS_PER_TURN = 100

SCRIPT = '''
from agent_loop.servers.scripted import ScriptedReply

REPLIES = {turn: ScriptedReply(tuple(range(100, 200)), latency_s=0.0) for turn in range(8)}


def at_once(request):
    return REPLIES[0]


def by_seed(request):
    """The session's own latency, in milliseconds, is its seed."""
    return ScriptedReply(REPLIES[0].token_ids, latency_s=request.sampling_params.seed / 1000)
'''


# -- trajectories ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    cpu_ms: float
    wall_ms: float


async def measure_manager(config: Config, *, num_rows: int) -> Cost:
    """Return the CPU and wall time per trajectory."""
    manager: AgentLoopManager = create_manager(config)
    async with manager:
        await manager.run(rows(num_rows))
        cpu, wall = tree_cpu_seconds(), time.perf_counter()
        await manager.run(rows(num_rows))
        return Cost(
            1000 * (tree_cpu_seconds() - cpu) / num_rows, 1000 * (time.perf_counter() - wall) / num_rows
        )


def trajectories_table(folder: Path, *, num_rows: int) -> Table:
    local = asyncio.run(
        measure_manager(make_project_config(folder, runtime="local", script="answer"), num_rows=num_rows)
    )
    on_ray = asyncio.run(measure_manager(make_project_config(folder, script="answer"), num_rows=num_rows))
    table = Table(
        "runtime", "CPU ms per trajectory", "wall ms", "ratio of CPU", title="Tool loop, 4 assistant turns"
    )
    for name, cost in (("local", local), ("ray", on_ray)):
        table.add_row(name, f"{cost.cpu_ms:.2f}", f"{cost.wall_ms:.2f}", f"{cost.cpu_ms / local.cpu_ms:.2f}")
    return table


# -- the balancer ------------------------------------------------------------------------------------------------------


class BalancerActor:
    """Balancer shared by all workers."""

    def __init__(self, servers: list[str]) -> None:
        self._balancer = LoadBalancer(servers)

    async def acquire(self, request: SlotRequest) -> str:
        lease = self._balancer.acquire(request)
        assert lease is not None
        return lease.server

    async def release(self, request_id: str, num_new_tokens: int) -> None:
        self._balancer.release(request_id, num_new_tokens=num_new_tokens)

    def end_session(self, session: str) -> None:
        self._balancer.end_session(session)


class Client:
    """Worker that only sends requests."""

    def __init__(self, index: int, servers: list[Any], balancer: Any, *, shares_counts: bool) -> None:
        self._index = index
        self._balancer = balancer
        order = [*servers[index % len(servers) :], *servers[: index % len(servers)]]
        self._servers = {
            info.name: RemoteServer(
                actor,
                client=f"client-{index}",
                info=info,
                on_other_requests=self._note if shares_counts else None,
            )
            for actor, info in order
        }
        self._pool = ServerPool(self._servers.values())
        self._manager = AsyncLLMServerManager(self._pool)

    async def run(self, latencies_ms: list[int], *, num_turns: int) -> None:
        generate = self._by_own_balancer if self._balancer is None else self._by_actor

        async def session(number: int, latency_ms: int) -> None:
            name = f"{self._index}/{number}"
            params = SamplingParams(seed=latency_ms)
            context = np.arange(100, 500, dtype=np.int32)
            with self._manager.scope() as scoped:
                for turn in range(num_turns):
                    new = await generate(scoped, name, context, params)
                    context = np.concatenate(
                        [context, np.asarray(new, np.int32), np.full(78, turn, np.int32)]
                    )
            if self._balancer is not None:
                self._balancer.end_session.remote(name)

        await run_together(session(number, latency) for number, latency in enumerate(latencies_ms))

    async def _by_own_balancer(
        self, scoped: AsyncLLMServerManager, name: str, context: Any, params: SamplingParams
    ) -> list[int]:
        return (await scoped.generate(name, prompt_ids=context, sampling_params=params)).token_ids

    async def _by_actor(
        self, scoped: AsyncLLMServerManager, name: str, context: Any, params: SamplingParams
    ) -> list[int]:
        request = SlotRequest(f"{name}/{len(context)}", name, len(context))
        server = self._servers[await self._balancer.acquire.remote(request)]
        output = await server.generate(context, params, name)
        self._balancer.release.remote(request.id, len(output.token_ids))
        return output.token_ids

    def _note(self, server: str, num_requests: int) -> None:
        self._pool.balancer.set_external_requests(server, num_requests)


async def measure_balancer(
    variant: str, *, script: str, latencies_ms: list[list[int]], num_turns: int
) -> tuple[Cost, float]:
    """Return the cost per turn, and the mean ratio of the largest to the mean number of requests per server."""
    config = parse_section(
        Config, {"rollout": {"engine": "scripted", "engine_kwargs": {"script": script}}}, where="bench"
    )
    make_server = ray.remote(num_cpus=0, max_concurrency=100_000, concurrency_groups={CONTROL_GROUP: 64})(
        ServerActor
    )
    actors = [
        make_server.remote(
            ServerSpec(f"server-{n}", config.model, 100_000, engine_kwargs=config.rollout.engine_kwargs),
            rollout=config.rollout,
            folder=str(Path.cwd()),
        )
        for n in range(NUM_SERVERS)
    ]
    servers = [(actor, await actor.ensure_started.remote(None)) for actor in actors]
    balancer = None
    if variant == "one actor":
        balancer = ray.remote(num_cpus=0, max_concurrency=10_000)(BalancerActor).remote(
            [info.name for _, info in servers]
        )
    make_client = ray.remote(num_cpus=0)(Client)
    clients = [
        make_client.remote(n, servers, balancer, shares_counts=variant == "in the workers, shared counts")
        for n in range(NUM_WORKERS)
    ]
    await run_together(wait_for(client.run.remote([0], num_turns=1)) for client in clients)
    imbalances: list[float] = []

    async def watch() -> None:
        while True:
            running = [
                (await actor.inspect.options(concurrency_group=CONTROL_GROUP).remote())["running"]
                for actor in actors
            ]
            if sum(running) > 0.3 * sum(map(len, latencies_ms)):
                imbalances.append(max(running) / statistics.mean(running))
            await asyncio.sleep(0.1)

    num = sum(map(len, latencies_ms)) * num_turns
    cpu, wall = tree_cpu_seconds(), time.perf_counter()
    async with running_in_background(watch()) if max(map(max, latencies_ms)) else nullcontext():
        await run_together(
            wait_for(client.run.remote(own, num_turns=num_turns))
            for client, own in zip(clients, latencies_ms, strict=True)
        )
    seconds = time.perf_counter() - wall
    cost = Cost(1000 * (tree_cpu_seconds() - cpu) / num, 1000 * seconds / num)
    for actor in [*actors, *clients, *([balancer] if balancer else [])]:
        ray.kill(actor)
    return cost, statistics.mean(imbalances) if imbalances else 0.0


async def wait_for(call: Any) -> Any:
    return await call


def balancer_table(folder: Path, *, num_sessions: int) -> Table:
    (folder / "bench_script.py").write_text(SCRIPT, encoding="utf-8")
    rng = random.Random(0)
    idle = [[0] * (num_sessions // NUM_WORKERS) for _ in range(NUM_WORKERS)]
    # The first worker has the long conversations, which is the worst case for balancers without shared information.
    tails = [
        [min(int(1000 * rng.lognormvariate(0.0, 0.8)), 8000) * (3 if worker == 0 else 1) for _ in own]
        for worker, own in enumerate(idle)
    ]
    table = Table(
        "balancer",
        "CPU ms per turn",
        "wall ms per turn",
        "ratio of CPU",
        "max / mean requests per server",
        title=f"{NUM_WORKERS} workers, {NUM_SERVERS} servers, {NUM_TURNS} turns of {TOKENS_PER_TURN} tokens",
    )
    first: Cost | None = None
    for variant in ("in the workers, shared counts", "in the workers, own counts", "one actor"):
        cost, _ = asyncio.run(
            measure_balancer(
                variant, script=f"{folder}/bench_script.py:at_once", latencies_ms=idle, num_turns=NUM_TURNS
            )
        )
        _, imbalance = asyncio.run(
            measure_balancer(
                variant, script=f"{folder}/bench_script.py:by_seed", latencies_ms=tails, num_turns=NUM_TURNS
            )
        )
        first = first or cost
        table.add_row(
            variant,
            f"{cost.cpu_ms:.2f}",
            f"{cost.wall_ms:.2f}",
            f"{cost.cpu_ms / first.cpu_ms:.2f}",
            f"{imbalance:.3f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--sessions", type=int, default=400)
    arguments = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    console = Console()
    with tempfile.TemporaryDirectory() as name:
        folder = make_project(Path(name))
        ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False)
        try:
            console.print(trajectories_table(folder, num_rows=arguments.rows))
            console.print(balancer_table(folder, num_sessions=arguments.sessions))
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()

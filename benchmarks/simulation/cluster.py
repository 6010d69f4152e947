"""Simulation of a workload on a cluster. Everything between the loops and the servers is the production code."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import SimpleNamespace
from typing import Any, Literal, cast

from agent_loop.episode.limits import EpisodeLimits
from agent_loop.errors import ConfigError
from agent_loop.loops.base import LoopContext
from agent_loop.loops.registry import LoopRegistry
from agent_loop.rollout.components import make_gate
from agent_loop.rollout.jobs import Job
from agent_loop.rollout.worker import AgentLoopWorker
from agent_loop.servers.balancer import BalancerConfig, LoadBalancer
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.pool import ServerPool
from agent_loop.testing import run_virtual
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason
from simulation.engine import EngineModel
from simulation.loop import LOOP_NAME, SimulatedRun
from simulation.policies import LeastRequests, RoundRobin, StickyHash, StickyLeastRequests
from simulation.report import SimulationOutcome
from simulation.server import SimulatedServer
from simulation.workload import TrajectoryPlan


class PolicyName(StrEnum):
    """Policy that selects a server for a request."""

    LEAST_WORK = "least-work"
    ROUND_ROBIN = "round-robin"
    LEAST_REQUESTS = "least-requests"
    STICKY_HASH = "sticky-hash"
    VERL = "verl"


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """Servers of a simulated cluster, and the policy that balances them."""

    num_servers: int = 512
    model: EngineModel = field(default_factory=EngineModel)
    slow_share: float = 0.0
    """Share of slow servers, spread evenly over the list."""
    slow_speed: float = 0.5
    policy: PolicyName = PolicyName.LEAST_WORK
    balancer: BalancerConfig = field(default_factory=BalancerConfig)
    max_concurrent: int | Literal["auto"] | None = None
    """Limit of trajectories in flight, as in `rollout.max_concurrent`; None starts all at once."""

    def __post_init__(self) -> None:
        if self.num_servers < 1 or not 0 <= self.slow_share <= 1 or self.slow_speed <= 0:
            raise ConfigError(
                f"num_servers is {self.num_servers}, slow_share is {self.slow_share} and slow_speed is "
                f"{self.slow_speed}; give at least one server, a share from 0 to 1 and a speed above 0"
            )

    @property
    def speeds(self) -> list[float]:
        """Speed of each server."""
        num_slow = round(self.num_servers * self.slow_share)
        slow = {number * self.num_servers // num_slow for number in range(num_slow)}
        return [self.slow_speed if number in slow else 1.0 for number in range(self.num_servers)]

    @property
    def capacity(self) -> float:
        """Capacity of the cluster, in servers of full speed."""
        return sum(self.speeds)

    def perfect(self) -> SimulatedCluster:
        """Return a cluster of one server with the capacity of all servers."""
        return replace(
            self,
            num_servers=1,
            slow_share=0.0,
            model=self.model.scaled(self.capacity),
            policy=PolicyName.LEAST_WORK,
        )


def simulate(cluster: SimulatedCluster, plans: Sequence[TrajectoryPlan]) -> SimulationOutcome:
    """Run all plans on a virtual clock."""
    return run_virtual(run_cluster(cluster, plans))


async def run_cluster(cluster: SimulatedCluster, plans: Sequence[TrajectoryPlan]) -> SimulationOutcome:
    """Run all plans on the clock of the running event loop."""
    run = SimulatedRun(plans)
    servers = [
        SimulatedServer(
            run.next_tokens, model=replace(cluster.model, speed=speed), name=f"server-{number:03}"
        )
        for number, speed in enumerate(cluster.speeds)
    ]
    pool = ServerPool(servers, balancer=_balancer(cluster))
    manager = AsyncLLMServerManager(pool)
    num_failed = 0
    clock = asyncio.get_running_loop().time
    started = clock()

    def count_failures(trajectory: Trajectory) -> None:
        nonlocal num_failed
        num_failed += trajectory.output.stop_reason is StopReason.FAILED

    async with AsyncExitStack() as background:
        if cluster.max_concurrent == "auto":
            await background.enter_async_context(manager.pool.watching())
        await _worker(manager, cluster).run(
            [_job(p, run) for p in run.plans.values()], on_trajectory=count_failures
        )
        makespan_s = clock() - started
    return SimulationOutcome(makespan_s=makespan_s, ended=tuple(run.ended), num_failed=num_failed)


def _worker(manager: AsyncLLMServerManager, cluster: SimulatedCluster) -> AgentLoopWorker:
    context = LoopContext(
        server_manager=manager,
        # A plan has no text.
        template=cast(Any, SimpleNamespace(tokenizer=None, encoder=SimpleNamespace(decode=None))),
        limits=EpisodeLimits(prompt_length=1, response_length=1),
    )
    return AgentLoopWorker(
        context,
        loops=LoopRegistry(),
        default_agent_loop=LOOP_NAME,
        gate=make_gate(cluster.max_concurrent, pool=manager.pool),
    )


def _job(plan: TrajectoryPlan, run: SimulatedRun) -> Job:
    return Job({"plan": plan, "run": run}, plan.group, int(plan.id.rpartition("/")[2]), {})


def _balancer(cluster: SimulatedCluster) -> LoadBalancer:
    kinds = {
        PolicyName.LEAST_WORK: LoadBalancer,
        PolicyName.ROUND_ROBIN: RoundRobin,
        PolicyName.LEAST_REQUESTS: LeastRequests,
        PolicyName.STICKY_HASH: StickyHash,
        PolicyName.VERL: StickyLeastRequests,
    }
    return kinds[cluster.policy](config=cluster.balancer)

"""Simulation of a workload on a cluster. Everything between the loops and the servers is the production code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
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
from agent_loop.runtime.concurrency import running_in_background
from agent_loop.servers.base import AsyncServerBase
from agent_loop.servers.forecast import Forecast
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.policy import BalancerConfig, LeastWork, Policy
from agent_loop.servers.pool import ServerPool
from agent_loop.simulation.engine import EngineModel
from agent_loop.simulation.loop import LOOP_NAME, SimulatedRun
from agent_loop.simulation.policies import LeastRequests, RoundRobin, StickyHash, StickyLeastRequests
from agent_loop.simulation.report import LoadSample, SimulationOutcome
from agent_loop.simulation.server import SimulatedServer
from agent_loop.simulation.workload import TrajectoryPlan
from agent_loop.testing import run_virtual
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason

SAMPLE_EVERY_S = 1.0
"""Interval in seconds at which the load of the servers is sampled."""


class PolicyName(StrEnum):
    """Policy that selects a server for a request."""

    LEAST_WORK = "least-work"
    ROUND_ROBIN = "round-robin"
    LEAST_REQUESTS = "least-requests"
    STICKY_HASH = "sticky-hash"
    VERL = "verl"


class OrderName(StrEnum):
    """Order of queued requests."""

    ARRIVAL = "arrival"
    LEARNT = "learnt"
    """The trajectory with the most work left first, as predicted from the run so far."""
    ORACLE = "oracle"
    """The trajectory with the most work left first, as known from its plan."""


class FaultKind(StrEnum):
    """Kind of a server fault."""

    DIES = "dies"
    HANGS = "hangs"


@dataclass(frozen=True, slots=True)
class ServerFault:
    """Fault of a server. The server recovers if `for_s` is finite."""

    server: int
    at_s: float
    for_s: float = float("inf")
    kind: FaultKind = FaultKind.DIES


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """Servers of a simulated cluster, and the policy that balances them."""

    num_servers: int = 512
    model: EngineModel = field(default_factory=EngineModel)
    slow_share: float = 0.0
    """Share of slow servers, spread evenly over the list."""
    slow_speed: float = 0.5
    policy: PolicyName = PolicyName.LEAST_WORK
    order: OrderName = OrderName.ARRIVAL
    balancer: BalancerConfig = field(default_factory=BalancerConfig)
    max_concurrent: int | Literal["auto"] | None = None
    """Limit of trajectories in flight, as in `rollout.max_concurrent`; None starts all at once."""
    faults: tuple[ServerFault, ...] = ()

    def __post_init__(self) -> None:
        if self.num_servers < 1 or not 0 <= self.slow_share <= 1 or self.slow_speed <= 0:
            raise ConfigError(
                f"num_servers is {self.num_servers}, slow_share is {self.slow_share} and slow_speed is "
                f"{self.slow_speed}; give at least one server, a share from 0 to 1 and a speed above 0"
            )
        if self.order is not OrderName.ARRIVAL and self.policy is not PolicyName.LEAST_WORK:
            raise ConfigError(
                f"order is {self.order}, but policy {self.policy} has no queue to order; use policy "
                f"{PolicyName.LEAST_WORK}"
            )
        for fault in self.faults:
            if not 0 <= fault.server < self.num_servers:
                raise ConfigError(
                    f"a fault names server {fault.server}; give a number from 0 to {self.num_servers - 1}"
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
            faults=(),
        )


def simulate(
    cluster: SimulatedCluster,
    plans: Sequence[TrajectoryPlan],
    *,
    on_trajectory: Callable[[], None] | None = None,
) -> SimulationOutcome:
    """Run all plans on a virtual clock.

    Args:
        cluster: The simulated cluster.
        plans: The trajectories to run.
        on_trajectory: Called whenever a trajectory has ended.
    """
    return run_virtual(run_cluster(cluster, plans, on_trajectory=on_trajectory))


async def run_cluster(
    cluster: SimulatedCluster,
    plans: Sequence[TrajectoryPlan],
    *,
    on_trajectory: Callable[[], None] | None = None,
) -> SimulationOutcome:
    """Run all plans on the clock of the running event loop; see `simulate`."""
    run = SimulatedRun(plans)
    servers = [
        SimulatedServer(
            run.next_tokens, model=replace(cluster.model, speed=speed), name=f"server-{number:03}"
        )
        for number, speed in enumerate(cluster.speeds)
    ]
    async with running_in_background(_inject_faults(servers, cluster.faults)):
        outcome = await run_on_servers(run, cluster=cluster, servers=servers, on_trajectory=on_trajectory)
    return replace(outcome, busy_s=sum(server.engine.busy_s for server in servers))


async def run_on_servers(
    run: SimulatedRun,
    *,
    cluster: SimulatedCluster,
    servers: Sequence[AsyncServerBase],
    on_trajectory: Callable[[], None] | None = None,
) -> SimulationOutcome:
    """Run the plans on the given servers, simulated or real, under the cluster's policy."""
    pool = ServerPool(servers, policy=_policy(cluster), forecast=_forecast(cluster, run))
    manager = AsyncLLMServerManager(pool)
    samples: list[LoadSample] = []
    failed: list[Trajectory] = []
    clock = asyncio.get_running_loop().time
    started = clock()

    def count_failures(trajectory: Trajectory) -> None:
        if trajectory.output.stop_reason is StopReason.FAILED:
            failed.append(trajectory)
        if on_trajectory is not None:
            on_trajectory()

    async with AsyncExitStack() as background:
        if cluster.faults or cluster.max_concurrent == "auto":
            await background.enter_async_context(manager.watching())
        speeds = {server.name: speed for server, speed in zip(servers, cluster.speeds, strict=True)}
        await background.enter_async_context(running_in_background(_sample_load(pool, speeds, samples)))
        await _worker(manager, cluster).run(
            [_job(p, run) for p in run.plans.values()], on_trajectory=count_failures
        )
        makespan_s = clock() - started
    return SimulationOutcome(
        makespan_s=makespan_s,
        ended=tuple(run.ended),
        samples=tuple(samples),
        num_servers=len(servers),
        num_failed=len(failed),
        first_failure=next((t.output.failure.error for t in failed if t.output.failure), None),
        num_failovers=pool.num_failovers,
    )


def _worker(manager: AsyncLLMServerManager, cluster: SimulatedCluster) -> AgentLoopWorker:
    context = LoopContext(
        server_manager=manager,
        template=cast(Any, SimpleNamespace(tokenizer=None)),  # a plan has no text
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


def _policy(cluster: SimulatedCluster) -> Policy:
    config = replace(cluster.balancer, longest_first=cluster.order is not OrderName.ARRIVAL)
    match cluster.policy:
        case PolicyName.LEAST_WORK:
            return LeastWork(config)
        case PolicyName.ROUND_ROBIN:
            return RoundRobin(config)
        case PolicyName.LEAST_REQUESTS:
            return LeastRequests(config)
        case PolicyName.STICKY_HASH:
            return StickyHash(config)
        case PolicyName.VERL:
            return StickyLeastRequests(config)


def _forecast(cluster: SimulatedCluster, run: SimulatedRun) -> Forecast | None:
    return _OracleForecast(cluster.model, run) if cluster.order is OrderName.ORACLE else None


class _OracleForecast:
    """Forecast that reads the remaining work from the plans."""

    def __init__(self, model: EngineModel, run: SimulatedRun) -> None:
        self._step_s = 1 / (model.best_tokens_per_s / model.max_concurrent)
        self._run = run
        self._turns: dict[str, int] = {}

    def begin_turn(self, session: str) -> float:
        """Return the seconds that a trajectory has left: its tools, and decoding steps of a full batch."""
        turn = self._turns.get(session, 0)
        self._turns[session] = turn + 1
        plan = self._run.plans[session]
        tools = sum(turn.tool_s for turn in plan.turns[turn:-1])
        return tools + self._step_s * sum(turn.num_tokens for turn in plan.turns[turn:])

    def end(self, session: str) -> None:
        self._turns.pop(session, None)


async def _sample_load(pool: ServerPool, speeds: Mapping[str, float], samples: list[LoadSample]) -> None:
    while True:
        await asyncio.sleep(SAMPLE_EVERY_S)
        work = [work / speeds[name] for name, work in pool.balancer.outstanding_work.items()]
        mean = sum(work) / max(len(work), 1)
        samples.append(
            LoadSample(
                num_in_flight=pool.balancer.num_leases,
                num_waiting=pool.balancer.num_queued,
                imbalance=max(work) / mean if mean else 1.0,
            )
        )


async def _inject_faults(servers: Sequence[SimulatedServer], faults: Sequence[ServerFault]) -> None:
    async def one(fault: ServerFault) -> None:
        server = servers[fault.server]
        await asyncio.sleep(fault.at_s)
        if fault.kind is FaultKind.DIES:
            server.die()
        else:
            server.hang()
        await asyncio.sleep(fault.for_s)
        server.revive()

    async with asyncio.TaskGroup() as group:
        for fault in faults:
            group.create_task(one(fault))

"""Complete runs with the real manager, pool, balancer and worker on simulated engines."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from simulation.cluster import (
    PolicyName,
    SimulatedCluster,
    run_cluster,
    simulate,
)
from simulation.engine import EngineModel
from simulation.report import MakespanBounds, SimulationReport
from simulation.server import SimulatedServer
from simulation.workload import Workload

pytestmark = pytest.mark.virtual_time

SMALL = SimulatedCluster(num_servers=4, model=EngineModel(max_concurrent=8, kv_tokens=200_000))
PLANS = Workload(num_trajectories=100).plans()
IDEAL_S = simulate(SMALL.perfect(), PLANS).makespan_s


def report_of(cluster: SimulatedCluster) -> SimulationReport:
    bounds = MakespanBounds.of(PLANS, model=cluster.model, capacity=cluster.capacity)
    return SimulationReport.of(simulate(cluster, PLANS), bounds=bounds, perfect_s=IDEAL_S)


@pytest.mark.parametrize("policy", list(PolicyName))
def test_every_policy_completes_every_trajectory(policy: PolicyName) -> None:
    report = report_of(replace(SMALL, policy=policy))
    assert (report.num_trajectories, report.num_failed) == (100, 0)
    assert report.to_bound > 1
    assert report.latency_s["p50"] <= report.latency_s["p99"] <= report.makespan_s
    if policy in (PolicyName.STICKY_HASH, PolicyName.VERL):
        assert report.prefix_hit_rate > 0.99


async def test_cancelling_a_thousand_trajectories_releases_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers: list[SimulatedServer] = []
    make = SimulatedServer.__init__

    def remember(self: SimulatedServer, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        servers.append(self)

    monkeypatch.setattr(SimulatedServer, "__init__", remember)

    cluster = SimulatedCluster(num_servers=4, model=EngineModel(max_concurrent=250))
    run = asyncio.ensure_future(run_cluster(cluster, Workload(num_trajectories=1200).plans()))
    await asyncio.sleep(5)
    assert sum(server.num_running for server in servers) > 500
    began = asyncio.get_running_loop().time()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert asyncio.get_running_loop().time() - began < 1
    assert [(server.num_running, server.engine.num_running) for server in servers] == [(0, 0)] * 4
    assert len(asyncio.all_tasks()) == 1

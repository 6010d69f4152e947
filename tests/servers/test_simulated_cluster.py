"""Complete runs with the real manager, pool, balancer and worker on simulated engines."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from simulation.cluster import (
    OrderName,
    PolicyName,
    SimulatedCluster,
    run_cluster,
    simulate,
)
from simulation.engine import EngineModel
from simulation.report import MakespanBounds, SimulationReport
from simulation.server import SimulatedServer
from simulation.workload import Workload

from agent_loop.servers.decode_speed import DecodeSpeedEstimator
from agent_loop.servers.forecast import RemainingTurnsForecast
from agent_loop.testing import run_virtual

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


def test_equal_servers_are_almost_as_fast_as_one_server_of_their_capacity() -> None:
    report = report_of(SMALL)
    assert report.to_perfect is not None
    assert report.to_perfect < 1.1
    assert report.prefix_hit_rate > 0.9


def test_the_default_policy_finds_the_slow_server_and_sticky_sessions_suffer_from_it() -> None:
    plans = Workload(num_trajectories=300).plans()
    cluster = SimulatedCluster(num_servers=10, slow_share=0.2, model=EngineModel(max_concurrent=8))
    perfect_s = simulate(cluster.perfect(), plans).makespan_s
    assert simulate(cluster, plans).makespan_s < 1.15 * perfect_s
    assert simulate(replace(cluster, policy=PolicyName.VERL), plans).makespan_s > 1.4 * perfect_s


def test_the_same_seed_gives_the_same_run() -> None:
    assert Workload(num_trajectories=40, seed=3).plans() == Workload(num_trajectories=40, seed=3).plans()
    assert Workload(num_trajectories=40, seed=3).plans() != Workload(num_trajectories=40, seed=4).plans()
    assert simulate(SMALL, PLANS[:40]) == simulate(SMALL, PLANS[:40])


@pytest.mark.parametrize("order", [OrderName.LEARNT, OrderName.ORACLE])
def test_the_queue_can_be_ordered_by_remaining_work(order: OrderName) -> None:
    report = report_of(replace(SMALL, order=order))
    assert (report.num_trajectories, report.num_failed) == (100, 0)


def test_cancelling_a_thousand_trajectories_releases_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    servers: list[SimulatedServer] = []
    make = SimulatedServer.__init__

    def remember(self: SimulatedServer, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        servers.append(self)

    monkeypatch.setattr(SimulatedServer, "__init__", remember)

    async def main() -> None:
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

    run_virtual(main())


def test_speeds_and_the_cost_of_an_empty_step_are_estimated_from_completions() -> None:
    estimate, speeds = DecodeSpeedEstimator(), {"a": 1.0, "b": 1.0, "c": 1.0, "slow": 0.5}
    for number in range(2000):
        for server, speed in speeds.items():
            in_flight = 4 + (7 * number) % 60
            estimate.begin(f"{server}{number}", server=server, num_in_flight=in_flight)
            estimate.end(
                f"{server}{number}",
                num_in_flight=in_flight,
                num_new_tokens=100,
                seconds=100 * (0.020 + 0.001 * in_flight) / speed,
            )
    assert estimate.overhead == pytest.approx(20, rel=0.3)
    assert estimate.speed_of("slow") / estimate.speed_of("a") == pytest.approx(0.5, rel=0.15)
    assert estimate.speed_of("a") == estimate.speed_of("b") == estimate.speed_of("c")
    estimate.forget("slow")
    assert estimate.speed_of("slow") == 1.0


def test_one_server_alone_is_not_timed() -> None:
    estimate = DecodeSpeedEstimator()

    def completes(server: str, *, seconds: float) -> None:
        estimate.begin("r", server=server, num_in_flight=1)
        estimate.end("r", num_in_flight=1, num_new_tokens=100, seconds=seconds)

    for _ in range(50):
        completes("a", seconds=7.0)
    assert (estimate.overhead, estimate.speed_of("a")) == (0.0, 1.0)
    for _ in range(50):
        completes("b", seconds=7.0)
        completes("a", seconds=21.0)
    assert estimate.overhead > 0
    assert estimate.speed_of("a") < estimate.speed_of("b")


def test_the_forecast_learns_from_ended_sessions_and_ignores_running_ones() -> None:
    forecast = RemainingTurnsForecast()
    for session in range(4000):
        turns = 20 if session % 10 == 0 else 2
        for _ in range(turns):
            forecast.begin_turn(str(session))
        if turns == 2:
            forecast.end(str(session))
    first, second, third = (forecast.begin_turn("new") for _ in range(3))
    assert first > second > 2
    assert third > 2 * first

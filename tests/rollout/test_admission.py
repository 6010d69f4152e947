"""Bound on the trajectories in flight: the control rule, the gate, and both with simulated servers."""

from __future__ import annotations

import asyncio
import math
from typing import Any, Literal

import pytest
from simulation.cluster import SimulatedCluster, simulate
from simulation.engine import EngineModel
from simulation.workload import Workload

from agent_loop.rollout.admission import AdmissionControl
from agent_loop.rollout.gate import AdmissionGate
from agent_loop.servers.base import AsyncServerBase
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.pool import ServerUsage
from agent_loop.types import IntArray, TokenOutput


def costly(num_turns: int) -> ServerUsage:
    """Return the usage of turns whose context was recomputed."""
    return ServerUsage(num_turns, num_sampled_tokens=100 * num_turns, num_recomputed_tokens=1000 * num_turns)


def cheap(num_turns: int) -> ServerUsage:
    return ServerUsage(num_turns, num_sampled_tokens=100 * num_turns)


def updated(
    control: AdmissionControl, usage: ServerUsage | None = None, *, num_in_flight: int, **report: Any
) -> float:
    """Return the bound after one update. By default, the servers are full, did no work, and report no cache use."""
    defaults = {"num_running": 1000, "num_waiting": 0, "kv_cache_share": None, "demand": None}
    return control.update(usage or ServerUsage(), num_in_flight=num_in_flight, **{**defaults, **report})


# -- control rule ------------------------------------------------------------------------------------------------------


def test_servers_that_report_no_usage_do_not_limit_the_bound() -> None:
    control = AdmissionControl(num_slots=None)
    for _ in range(50):
        assert updated(control, cheap(100), num_in_flight=100, num_waiting=90) == math.inf
    control = AdmissionControl(num_slots=8)
    bounds = [updated(control, num_in_flight=int(control.bound)) for _ in range(6)]
    assert bounds == [16, 32, 64, 128, 256, 512]


def test_the_bound_doubles_only_while_the_caches_are_almost_empty() -> None:
    control = AdmissionControl(num_slots=64)
    assert updated(control, num_in_flight=64, demand=0.1) == 128
    assert updated(control, num_in_flight=128, demand=0.3) == 128
    assert updated(control, num_in_flight=128, demand=0.1) == 128
    assert updated(control, cheap(128), num_in_flight=128, demand=0.3) == 160
    assert updated(control, cheap(160), num_in_flight=160, demand=0.7) == 168


def test_after_a_costly_round_the_bound_falls_by_the_number_of_waiting_requests_and_no_further() -> None:
    control = AdmissionControl(num_slots=64)
    assert updated(control, costly(64), num_in_flight=64, num_waiting=10, demand=1.0) == 54
    # Ten trajectories from before the decrease still run, so that this round does not count.
    assert updated(control, costly(64), num_in_flight=60, num_waiting=10, demand=1.0) == 54
    assert updated(control, costly(54), num_in_flight=54, num_waiting=50, demand=1.0) == 37
    assert updated(control, costly(37), num_in_flight=37, demand=1.0) == 37


def test_recomputed_tokens_do_not_lower_the_bound_while_the_caches_have_room() -> None:
    control = AdmissionControl(num_slots=20)
    assert updated(control, costly(20), num_in_flight=20, num_waiting=10, demand=0.3) == 25
    assert updated(control, costly(25), num_in_flight=25, num_waiting=10, demand=0.8) == 25


async def test_a_pool_counts_the_tokens_that_its_servers_recompute() -> None:
    class Recomputes(AsyncServerBase):
        async def generate(self, prompt_ids: IntArray, *_: Any) -> TokenOutput:
            if len(prompt_ids) < 120:
                return TokenOutput([1, 2, 3], None, "stop")
            return TokenOutput([1, 2, 3], None, "stop", num_preempted=1, num_cached_tokens=40)

    manager = AsyncLLMServerManager([Recomputes()])
    for num_tokens in (97, 120):
        await manager.generate("s", prompt_ids=[1] * num_tokens, sampling_params={})
    assert manager.pool.usage == ServerUsage(2, 6, num_recomputed_tokens=60 + 120)


def test_the_bound_grows_while_servers_are_idle_even_after_costly_rounds() -> None:
    control = AdmissionControl(num_slots=64)
    for bound in (80, 100, 125):
        in_flight = int(control.bound)
        assert updated(control, costly(4), num_in_flight=in_flight, num_running=9, demand=1.2) == bound
    for report in (
        {"num_in_flight": 125, "num_running": 9, "kv_cache_share": 0.9},
        {"num_in_flight": 125, "num_running": 50},
        {"num_in_flight": 99, "num_running": 9},
    ):
        assert updated(control, costly(4), demand=1.2, **report) == 125


# -- gate --------------------------------------------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_trajectories_start_in_order_and_running_ones_continue_when_the_bound_falls() -> None:
    gate, started = AdmissionGate(bound=3), list[int]()

    async def run_trajectory(number: int) -> None:
        async with gate:
            started.append(number)
            await asyncio.sleep(10)

    async with asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(run_trajectory(number))
        await asyncio.sleep(1)
        assert (started, gate.num_waiting) == ([0, 1, 2], 3)
        gate.set_bound(1)
        await asyncio.sleep(1)
        assert gate.num_in_flight == 3
        await asyncio.sleep(10)
        assert (started, gate.num_in_flight) == ([0, 1, 2, 3], 1)
        gate.set_bound(5)
        await asyncio.sleep(1)
        assert started == [0, 1, 2, 3, 4, 5]
    assert (gate.num_in_flight, gate.num_waiting) == (0, 0)


@pytest.mark.virtual_time
async def test_a_trajectory_cancelled_in_the_queue_or_when_admitted_does_not_use_up_the_bound() -> None:
    gate = AdmissionGate(bound=1)

    async def run_trajectory(seconds: float) -> None:
        async with gate:
            await asyncio.sleep(seconds)

    async with asyncio.TaskGroup() as group:
        first, waiting, admitted, _ = (group.create_task(run_trajectory(5)) for _ in range(4))
        await asyncio.sleep(1)
        waiting.cancel()
        first.cancel()  # admits `admitted`, which is cancelled before it runs
        await asyncio.sleep(0)
        admitted.cancel()
    assert (gate.num_in_flight, gate.num_waiting) == (0, 0)
    assert asyncio.get_running_loop().time() == pytest.approx(6)


# -- with simulated servers --------------------------------------------------------------------------------------------


def makespan_s(kv_tokens: int, bound: Literal["auto"] | None, *, per_server: int) -> float:
    plans = Workload(num_trajectories=2 * per_server, seed=0).plans()
    cluster = SimulatedCluster(num_servers=2, model=EngineModel(kv_tokens=kv_tokens), max_concurrent=bound)
    outcome = simulate(cluster, plans)
    assert len(outcome.ended) == len(plans)
    return outcome.makespan_s


@pytest.mark.parametrize(
    ("kv_tokens", "per_server", "max_share"),
    [pytest.param(400_000, 800, 0.8, marks=pytest.mark.slow), (800_000, 200, 1.02)],
)
def test_an_adaptive_bound_shortens_the_rollout_if_the_kv_cache_is_too_small_and_costs_nothing_otherwise(
    kv_tokens: int, per_server: int, max_share: float
) -> None:
    bounded, unbounded = (makespan_s(kv_tokens, bound, per_server=per_server) for bound in ("auto", None))
    assert bounded < max_share * unbounded

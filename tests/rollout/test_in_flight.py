"""Trajectories in flight: the bound on their number, and reports of what they wait for."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import Any, Literal

import pytest
from simulation.cluster import SimulatedCluster, simulate
from simulation.engine import EngineModel
from simulation.workload import Workload

from agent_loop.config import MultiTurnConfig
from agent_loop.rewards.function import RewardFunction
from agent_loop.rollout.admission import AdmissionControl
from agent_loop.rollout.batch import timing_metrics
from agent_loop.rollout.gate import AdmissionGate
from agent_loop.rollout.monitor import LagMonitor, TrajectoryMonitor
from agent_loop.runtime.activity import ActivityMonitor, WaitKind, waiting_for
from agent_loop.servers.base import AsyncServerBase
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.pool import ServerPool, ServerUsage
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest
from agent_loop.trajectory import AgentLoopOutput
from agent_loop.types import IntArray, TokenOutput
from tests.helpers import encoded, small_tokenizer, text_reply, tool_call_reply, user
from tests.rollout.harness import Adder, WorkerHarness


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "agent_loop.rollout.monitor"]


def hangs(request: ScriptedRequest) -> ScriptedReply:
    """Never complete prompts with `engine`, answer prompts with `reward`, and call a tool for all others."""
    prompt = str(small_tokenizer().decode(request.prompt_ids))
    if "engine" in prompt:
        return ScriptedReply(encoded("never"), latency_s=math.inf)
    return text_reply("done") if "reward" in prompt or request.turn else tool_call_reply("add", a=1, b=2)


@pytest.mark.virtual_time
async def test_a_stalled_rollout_logs_what_trajectories_wait_for(caplog: pytest.LogCaptureFixture) -> None:
    async def reward(output: AgentLoopOutput, row: dict[str, Any]) -> float:
        await asyncio.sleep(math.inf)
        return 1.0

    harness = WorkerHarness(
        hangs,
        tools=[Adder({"latency_s": math.inf})],
        reward=RewardFunction(reward, timeout_s=10_000),
        multi_turn=MultiTurnConfig(tool_timeout_s=10_000),
        silence_s=120,
        max_concurrent=14,
        deadline_s=1500,
    )
    rows = [{"raw_prompt": user(what)} for what in ["tool", "engine", "reward"] + ["engine"] * 17]
    with caplog.at_level(logging.WARNING), pytest.raises(TimeoutError):
        async with asyncio.timeout(1000):
            await harness.worker.run(harness.jobs(rows))
    harness.assert_nothing_is_left()
    first, *later = reports(caplog)
    lines = first.split("\n  ")
    assert lines[0].startswith("no progress for 120 s; last: group=")
    assert lines[1] == (
        "14 trajectories in flight, by what they wait for: generate 12, tool 1, reward 1; "
        "6 more have not started (rollout.max_concurrent)"
    )
    waits = ("tool add", "generate scripted-0", "reward")
    assert {f"group={n}/rollout=0: {wait} for 120 s" for n, wait in enumerate(waits)} < set(lines)
    assert lines[-2] == "and 4 more"
    assert lines[-1] == (
        "server scripted-0: alive, 12 requests of this worker; it reports 12 running, 0 waiting, KV cache in "
        "use unknown, weights 0"
    )
    assert [report.split(";")[0] for report in later] == [f"no progress for {n} s" for n in (240, 480, 960)]


def test_progress_logs_nothing_and_a_second_stall_is_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    latencies_s = iter([100.0, 130.0, 100.0, 130.0])
    harness = WorkerHarness(
        lambda _: text_reply("x", latency_s=next(latencies_s)), silence_s=120, max_concurrent=1
    )
    with caplog.at_level(logging.WARNING):
        harness.run([{"raw_prompt": user("?")}] * 4)
    assert [report.split(";")[0] for report in reports(caplog)] == ["no progress for 120 s"] * 2


@pytest.mark.virtual_time
async def test_a_server_that_was_lost_is_reported_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    multi_turn = MultiTurnConfig(tool_timeout_s=10_000)
    harness = WorkerHarness(hangs, tools=[Adder({"latency_s": 300.0})], multi_turn=multi_turn, silence_s=120)
    with caplog.at_level(logging.WARNING):
        async with asyncio.TaskGroup() as group:
            group.create_task(harness.worker.run(harness.jobs([{"raw_prompt": user("tool")}])))
            await asyncio.sleep(10)
            harness.server.die("out of memory")
            harness.server_manager.pool.mark_lost("scripted-0", reason="out of memory")
    assert "server scripted-0: excluded (out of memory), not alive (out of memory)" in reports(caplog)[0]


def test_the_lag_of_the_event_loop_is_in_the_timing_of_the_batch() -> None:
    class Blocking(Adder):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            loop: Any = asyncio.get_running_loop()
            loop.jump(3.0)  # like `time.sleep(3)`
            return await super().execute(instance_id, parameters, **kwargs)

    harness = WorkerHarness(
        lambda r: tool_call_reply("add", a=1, b=2) if r.turn == 0 else text_reply("3", latency_s=1.0),
        tools=[Blocking()],
        silence_s=120,
    )
    trajectories = harness.run([{"raw_prompt": user("1 + 2?")}])
    metrics = timing_metrics(trajectories)
    assert metrics["timing/event_loop_lag_max_s"] == pytest.approx(3.0, abs=0.06)
    assert 0 < metrics["timing/event_loop_lag_mean_s"] < 1
    assert metrics["timing/event_loop_late_share"] == pytest.approx(3 / 4, abs=0.03)


async def test_code_that_blocks_the_loop_is_logged_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    activity_monitor = ActivityMonitor()
    with (
        caplog.at_level(logging.WARNING),
        LagMonitor(activity_monitor, warn_s=0.1) as lag,
        activity_monitor.trajectory("group=4/rollout=2"),
    ):
        await asyncio.sleep(0.05)
        with waiting_for(WaitKind.TOOL, "slow"):
            time.sleep(0.6)  # noqa: ASYNC251  (the fault that is to be found)
        [seen, *_] = [r.getMessage() for r in caplog.records]
        await asyncio.sleep(0.1)
    assert lag.max_s > 0.4
    assert "by group=4/rollout=2 (tool slow), at" in seen
    assert "time.sleep(0.6)" in seen


@pytest.mark.virtual_time
async def test_cancelled_waits_leave_nothing_in_the_monitor() -> None:
    monitor = TrajectoryMonitor(gate=AdmissionGate(), pool=ServerPool([]), silence_s=None)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5), monitor.watching():
            with monitor.activity_monitor.trajectory("a"), waiting_for(WaitKind.QUEUE):
                [activity] = monitor.activity_monitor.activities
                assert [str(wait) for wait in activity.waits] == ["queue"]
                await asyncio.sleep(10)
    assert activity.waits == []
    assert monitor.activity_monitor.activities == ()


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

"""Reports of what trajectories wait for, and of code that blocks the event loop."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import Any

import pytest

from agent_loop.config import MultiTurnConfig
from agent_loop.rewards.function import RewardFunction
from agent_loop.rollout.batch import timing_metrics
from agent_loop.rollout.gate import AdmissionGate
from agent_loop.rollout.monitor import LagMonitor, TrajectoryMonitor
from agent_loop.runtime.activity import ActivityMonitor, WaitKind, waiting_for
from agent_loop.servers.pool import ServerPool
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest
from agent_loop.trajectory import AgentLoopOutput
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
async def test_a_rollout_without_progress_logs_what_every_trajectory_waits_for_at_growing_intervals(
    caplog: pytest.LogCaptureFixture,
) -> None:
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


def test_a_rollout_with_progress_logs_nothing_and_a_second_stall_is_logged_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
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


async def test_code_that_blocks_the_event_loop_is_logged_with_its_line_while_it_blocks(
    caplog: pytest.LogCaptureFixture,
) -> None:
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

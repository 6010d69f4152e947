from __future__ import annotations

import asyncio
import math
from collections import Counter
from contextlib import aclosing
from typing import Any

import pytest
from tensordict import TensorDict

from agent_loop.config import AgentConfig, RolloutConfig
from agent_loop.errors import DataError, EnvironmentUnavailable, RolloutError
from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.rewards.function import RewardFunction
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.servers.scripted import Script, ScriptedReply, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.trajectory import AgentLoopOutput, Trajectory
from agent_loop.types import StopReason
from tests.helpers import hermes_template, text_reply, user


def make_manager(
    script: Script, *, servers: list[ScriptedServer] | None = None, **settings: Any
) -> AgentLoopManager:
    def reward(output: AgentLoopOutput, row: Any) -> float:
        return float(row.get("worth", 0.5))

    return AgentLoopManager(
        RolloutConfig(**settings),
        servers=servers or [ScriptedServer(script, name=f"scripted-{n}") for n in range(2)],
        template=hermes_template(),
        reward=RewardFunction(reward, timeout_s=5),
    )


def rows(count: int) -> list[dict[str, Any]]:
    return [{"raw_prompt": user(f"question {n}"), "worth": n} for n in range(count)]


def hello(_: Any) -> ScriptedReply:
    return text_reply("hello", latency_s=1.0)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7])
@pytest.mark.parametrize("batch_size", [0, 1, 5])
def test_a_batch_of_any_size_is_returned_in_order_by_any_number_of_workers(
    batch_size: int, num_workers: int
) -> None:
    manager = make_manager(hello, n=2, agent=AgentConfig(num_workers=num_workers))
    trajectories = run_virtual(manager.run(rows(batch_size)))
    assert [(t.group, t.rollout) for t in trajectories] == [
        (g, n) for g in range(batch_size) for n in range(2)
    ]
    assert [t.reward for t in trajectories] == [float(t.group) for t in trajectories]


def test_a_batch_contains_the_training_columns_and_the_timings() -> None:
    manager = make_manager(hello, n=2)
    batch = run_virtual(manager.generate_sequences(rows(3)))
    assert isinstance(batch, TensorDict)
    assert batch.batch_size == (6,)
    shape = batch["responses"].shape
    assert batch["response_mask"].shape == batch["rollout_log_probs"].shape == shape
    assert batch["input_ids"].shape == batch["attention_mask"].shape == batch["position_ids"].shape
    assert batch["input_ids"].shape[1] == batch["prompts"].shape[1] + shape[1]
    assert batch["reward"].tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    timing = batch["timing"]
    assert timing["agent_loop/generate_sequences/mean"] == 1.0
    assert {
        "agent_loop/tool_calls/max",
        "agent_loop/num_preempted/min",
        "agent_loop/slowest/response_length",
    } <= set(timing)


def test_a_batch_is_padded_to_the_configured_limits() -> None:
    manager = make_manager(hello, pad_to="limits", prompt_length=40, response_length=30)
    batch = run_virtual(manager.generate_sequences(rows(1)))
    assert batch["prompts"].shape == (1, 40)
    assert batch["responses"].shape == (1, 30)


def test_servers_sleep_between_rollouts_even_after_a_failed_one() -> None:
    def script(_: Any) -> ScriptedReply:
        return ScriptedReply([1], error="down")

    servers = [ScriptedServer(script, name=name) for name in ("a", "b")]
    manager = make_manager(script, servers=servers, max_failed_share=0.0)

    async def scenario() -> None:
        with pytest.raises(RolloutError, match="down"):
            await manager.run(rows(2))
        assert await manager.run([]) == []

    run_virtual(scenario())
    assert all(server.is_asleep for server in servers)


def test_validation_samples_with_its_own_settings() -> None:
    seen: list[float] = []

    def script(request: Any) -> ScriptedReply:
        seen.append(request.sampling_params.temperature)
        return text_reply("hi")

    manager = make_manager(script, n=1, temperature=1.0, val={"temperature": 0.0, "n": 3})
    trajectories = run_virtual(manager.run(rows(2), validate=True))
    assert len(trajectories) == 6
    assert set(seen) == {0.0}


def test_one_trajectory_of_a_batch_can_be_cancelled() -> None:
    manager = make_manager(lambda _: text_reply("hello", latency_s=10.0), agent=AgentConfig(num_workers=2))

    async def scenario() -> list[Trajectory]:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(manager.run(rows(4)))
            await asyncio.sleep(5)
            assert manager.cancel("group=3/rollout=0")
        return running.result()

    reasons = Counter(t.output.stop_reason for t in run_virtual(scenario()))
    assert reasons == {StopReason.ANSWERED: 3, StopReason.CANCELLED: 1}


def test_a_cancelled_rollout_leaks_nothing_and_the_next_one_works() -> None:
    stuck = True

    def script(_: Any) -> ScriptedReply:
        return text_reply("hello", latency_s=math.inf if stuck else 0.0)

    manager = make_manager(script)

    async def scenario() -> list[Trajectory]:
        nonlocal stuck
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await manager.run(rows(8))
        assert manager.server_manager.pool.balancer.num_leases == 0
        assert manager.server_manager.pool.balancer.num_sessions == 0
        stuck = False
        return await manager.run(rows(8))

    assert len(run_virtual(scenario())) == 8


def by_row(request: Any) -> ScriptedReply:
    """Return a completion that takes longer for rows with higher numbers. The number is the end of the prompt."""
    return text_reply("hello", latency_s=float(len(request.prompt_ids)))


def test_trajectories_are_streamed_as_they_end() -> None:
    manager = make_manager(by_row, agent=AgentConfig(num_workers=2))
    work = [{"raw_prompt": user("long " * (5 - n))} for n in range(5)]

    async def scenario() -> list[int]:
        return [trajectory.group async for trajectory in manager.stream(work, n=1)]

    assert run_virtual(scenario()) == [4, 3, 2, 1, 0]


def test_leaving_the_stream_cancels_the_trajectories_in_flight() -> None:
    server = ScriptedServer(by_row)
    manager = make_manager(by_row, servers=[server], prompt_length=4096)
    work = [{"raw_prompt": user("long " * n)} for n in range(200)]

    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        async with aclosing(manager.stream(work, n=1)) as stream:
            taken = [await anext(stream) for _ in range(3)]
            left = clock()
        assert [trajectory.group for trajectory in taken] == [0, 1, 2]
        assert clock() - left < 1
        assert (server.num_running, server.num_sessions) == (0, 0)
        assert manager.server_manager.pool.balancer.num_leases == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(scenario())


def test_over_sampling_keeps_the_groups_that_end_first() -> None:
    manager = make_manager(by_row, agent=AgentConfig(num_workers=3))
    work = [{"raw_prompt": user("long " * (8 - n))} for n in range(8)]
    told: list[Trajectory] = []

    async def scenario() -> list[Trajectory]:
        trajectories = await manager.run(work, n=2, num_groups=3, on_trajectory=told.append)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert manager.server_manager.pool.balancer.num_leases == 0
        return trajectories

    trajectories = run_virtual(scenario())
    assert [(t.group, t.rollout) for t in trajectories] == [(5, 0), (5, 1), (6, 0), (6, 1), (7, 0), (7, 1)]
    assert len(told) == 6


@pytest.mark.parametrize(
    ("failing", "kept"),
    [
        ({"0.0", "0.1", "1.0", "1.1"}, [2, 3]),
        ({"0.0", "1.0", "1.1"}, [0, 2]),
        ({"0.0", "0.1", "1.0", "1.1", "3.0", "3.1"}, [0, 2]),
        ({f"{group}.{rollout}" for group in range(4) for rollout in range(2)}, [0, 1]),
    ],
)
def test_over_sampling_prefers_groups_with_a_trajectory_that_did_not_fail(
    failing: set[str], kept: list[int]
) -> None:
    """Failed trajectories end at once, and group 2 before group 3."""

    @register("fails_at_once")
    class FailsAtOnce(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
            started[row["worth"]] += 1
            if f"{row['worth']}.{started[row['worth']] - 1}" in failing:
                raise EnvironmentUnavailable("down")
            await asyncio.sleep(1 + row["worth"])
            return AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1])

    started: Counter[int] = Counter()
    manager = make_manager(
        hello, retries=0, max_failed_share=1.0, agent=AgentConfig(default_agent_loop="fails_at_once")
    )
    trajectories = run_virtual(manager.run(rows(4), n=2, num_groups=2))
    assert [t.group for t in trajectories] == [group for group in kept for _ in range(2)]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"prompt": "?"}, r"row 1 has no raw_prompt; its columns are prompt"),
        (
            {"raw_prompt": user("?"), "agent_name": "tool_agnet"},
            r"row 1: agent_name .* did you mean 'tool_agent'",
        ),
        ({"raw_prompt": user("?"), "tools_kwargs": {"sum": {}}}, r"row 1: tools_kwargs: there is no 'sum'"),
        ({"raw_prompt": user("?"), "interaction_kwargs": {"name": "x"}}, r"row 1: interaction_kwargs\.name"),
        (
            {"raw_prompt": user("?"), "interaction_kwargs": {"name": "gsm8k"}},
            r"no interaction is configured; set rollout\.multi_turn\.interaction_config_path",
        ),
    ],
)
def test_an_invalid_row_is_refused_before_anything_runs(row: dict[str, Any], complaint: str) -> None:
    seen: list[Any] = []

    def script(request: Any) -> ScriptedReply:
        seen.append(request)
        return text_reply("hi")

    with pytest.raises(DataError, match=complaint):
        run_virtual(make_manager(script).run([*rows(1), row]))
    assert seen == []

"""Runs of workers and managers: order, cancellation, failures, streams, over-sampling and resumed runs."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict

from agent_loop.config import AgentConfig, RolloutConfig
from agent_loop.errors import DataError, EnvironmentUnavailable, RolloutError, ServerError
from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.rewards.function import RewardFunction
from agent_loop.rollout.failures import FailureBudget
from agent_loop.rollout.jobs import Job
from agent_loop.rollout.journal import open_journal
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.rollout.stages import split_resumed
from agent_loop.runtime.concurrency import run_while
from agent_loop.runtime.instances import OnReplay
from agent_loop.runtime.isolated_task import num_abandoned
from agent_loop.servers.scripted import Script, ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.trajectory import AgentLoopOutput, IncidentKind, Trajectory
from agent_loop.types import StopReason
from tests.helpers import call_text, encoded, hermes_template, text_reply, tool_call_reply, user
from tests.loops.partials import TOKEN_S, CallCounts, CountingTool, scripted_turns
from tests.rollout.harness import Adder, WorkerHarness
from tests.rollout.journaled import key_of

pytestmark = pytest.mark.virtual_time


def make_manager(
    script: Script, *, servers: list[ScriptedServer] | None = None, agent: Any = None, **settings: Any
) -> AgentLoopManager:
    def reward(output: AgentLoopOutput, row: Any) -> float:
        return float(row.get("worth", 0.5))

    return AgentLoopManager(
        RolloutConfig(agent=AgentConfig(**{"num_workers": 2, **(agent or {})}), **settings),
        servers=servers or [ScriptedServer(script, name=f"scripted-{n}") for n in range(2)],
        template=hermes_template(),
        reward=RewardFunction(reward, timeout_s=5),
    )


def rows(count: int) -> list[dict[str, Any]]:
    return [{"raw_prompt": user(f"question {n}"), "worth": n} for n in range(count)]


def hello(_: Any) -> ScriptedReply:
    return text_reply("hello", latency_s=1.0)


def by_row(request: Any) -> ScriptedReply:
    """Return a completion that takes longer for longer prompts."""
    return text_reply("hello", latency_s=float(len(request.prompt_ids)))


def reasons(trajectories: list[Trajectory]) -> list[StopReason]:
    return [trajectory.output.stop_reason for trajectory in trajectories]


def assert_no_leases(manager: AgentLoopManager) -> None:
    balancer = manager.server_manager.pool.balancer
    assert balancer.num_leases == balancer.num_sessions == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7])
@pytest.mark.parametrize("batch_size", [0, 1, 5])
async def test_any_batch_is_in_order_for_any_number_of_workers(batch_size: int, num_workers: int) -> None:
    manager = make_manager(hello, n=2, agent={"num_workers": num_workers})
    trajectories = await manager.run(rows(batch_size))
    order = [(t.group, t.rollout) for t in trajectories]
    assert order == [(g, n) for g in range(batch_size) for n in range(2)]
    assert [t.reward for t in trajectories] == [float(t.group) for t in trajectories]


async def test_a_batch_contains_the_training_columns_and_the_timings() -> None:
    batch = await make_manager(hello, n=2).generate_sequences(rows(3))
    assert isinstance(batch, TensorDict)
    assert batch.batch_size == (6,)
    shape = batch["responses"].shape
    assert batch["response_mask"].shape == batch["rollout_log_probs"].shape == shape
    assert batch["input_ids"].shape == batch["attention_mask"].shape == batch["position_ids"].shape
    assert batch["input_ids"].shape[1] == batch["prompts"].shape[1] + shape[1]
    assert batch["reward"].tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    timing = batch["timing"]
    assert timing["agent_loop/generate_sequences/mean"] == 1.0
    assert {"tool_calls/max", "num_preempted/min", "slowest/response_length"} <= {
        name.removeprefix("agent_loop/") for name in timing
    }


async def test_validation_samples_with_its_own_settings() -> None:
    seen: list[float] = []

    def script(request: Any) -> ScriptedReply:
        seen.append(request.sampling_params.temperature)
        return text_reply("hi")

    manager = make_manager(script, n=1, temperature=1.0, val={"temperature": 0.0, "n": 3})
    assert len(await manager.run(rows(2), validate=True)) == 6
    assert set(seen) == {0.0}


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"prompt": "?"}, r"row 1 has no raw_prompt; its columns are prompt"),
        ({"agent_name": "tool_agnet"}, r"row 1: agent_name .* did you mean 'tool_agent'"),
        ({"tools_kwargs": {"sum": {}}}, r"row 1: tools_kwargs: there is no 'sum'"),
        (
            {"interaction_kwargs": {"name": "gsm8k"}},
            r"row 1: interaction_kwargs\.name.*no interaction is configured; "
            r"set rollout\.multi_turn\.interaction_config_path",
        ),
    ],
)
async def test_an_invalid_row_is_refused_before_anything_runs(row: dict[str, Any], complaint: str) -> None:
    server = ScriptedServer(hello)
    prompt = {} if "prompt" in row else {"raw_prompt": user("?")}
    with pytest.raises(DataError, match=complaint):
        await make_manager(hello, servers=[server]).run([*rows(1), {**prompt, **row}])
    assert server.requests == []


async def test_cancelling_the_batch_reaches_every_server_and_tool() -> None:
    tool = Adder({"latency_s": math.inf})
    harness = WorkerHarness(
        lambda request: tool_call_reply("add", a=1, b=2) if request.turn == 0 else text_reply("x"),
        tools=[tool],
    )
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5):
            await harness.worker.run(harness.jobs(rows(50)))
    harness.assert_nothing_is_left()
    assert tool.num_created == tool.num_released == 50


async def test_cancelling_one_trajectory_keeps_its_tokens_and_leaves_the_others() -> None:
    manager = make_manager(lambda _: text_reply("abcdefgh", latency_s=10.0))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(manager.run(rows(3)))
        await asyncio.sleep(5)
        assert manager.cancel("group=1/rollout=0")
        assert not manager.cancel("group=9/rollout=0")
    whole, part, _ = trajectories = running.result()
    assert reasons(trajectories) == [StopReason.ANSWERED, StopReason.CANCELLED, StopReason.ANSWERED]
    ids, num_kept = whole.output.response_ids.tolist(), len(part.output.response_ids)
    assert 0 < num_kept < len(ids)
    assert part.output.response_ids.tolist() == ids[:num_kept]
    assert part.reward is None


def test_the_first_requests_of_a_large_rollout_do_not_wait_until_all_trajectories_are_set_up() -> None:
    begun: list[int] = []

    def answer(_: ScriptedRequest) -> ScriptedReply:
        begun.append(len(harness.worker.running))
        return text_reply("3", latency_s=5.0)

    harness = WorkerHarness(answer)
    harness.run(rows(1000))
    assert begun[0] < 200
    assert begun[-1] == 1000


def test_cancelling_all_reaches_trajectories_that_have_not_started() -> None:
    def answer(_: ScriptedRequest) -> ScriptedReply:
        harness.worker.cancel_all()
        return text_reply("3", latency_s=5.0)

    harness = WorkerHarness(answer)
    assert set(reasons(harness.run(rows(1000)))) == {StopReason.CANCELLED}
    assert len(harness.server.requests) < 200


async def test_too_many_failures_stop_the_run_with_the_most_common_error_in_full() -> None:
    harness = WorkerHarness(lambda request: ScriptedReply([1], error="disk full", latency_s=1.0))
    budget = FailureBudget(num_trajectories=10, max_share=0.5)
    with pytest.raises(RolloutError, match=r"(?s)6 of 10 trajectories failed.*disk full"):
        await harness.worker.run(harness.jobs(rows(10)), budget=budget)
    harness.assert_nothing_is_left()


async def test_servers_sleep_between_rollouts_even_after_a_failed_one() -> None:
    servers = [ScriptedServer(lambda _: ScriptedReply([1], error="down"), name=name) for name in ("a", "b")]
    manager = make_manager(hello, servers=servers, max_failed_share=0.0)
    with pytest.raises(RolloutError, match="down"):
        await manager.run(rows(2))
    assert await manager.run([]) == []
    assert all(server.is_asleep for server in servers)


async def test_an_abandoned_loop_gets_no_more_completions() -> None:
    errors: list[BaseException] = []

    @register("goes_on")
    class GoesOn(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
            while not errors:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(150)
                    try:
                        await self.server_manager.generate("x", prompt_ids=[1], sampling_params={})
                    except ServerError as error:
                        errors.append(error)
            return AgentLoopOutput(segments=())

    harness = WorkerHarness(lambda _: text_reply("x"), agent="goes_on", deadline_s=10.0)
    [trajectory] = await harness.worker.run(harness.jobs(rows(1)))
    assert trajectory.output.stop_reason is StopReason.DEADLINE
    assert [incident.kind for incident in trajectory.output.incidents] == [IncidentKind.ABANDONED]
    await asyncio.sleep(300)
    assert num_abandoned() == 0
    harness.assert_nothing_is_left()
    assert "the trajectory is over" in str(errors[0])
    assert harness.server.requests == []


async def test_trajectories_are_streamed_as_they_end() -> None:
    work = [{"raw_prompt": user("long " * (5 - n))} for n in range(5)]
    groups = [trajectory.group async for trajectory in make_manager(by_row).stream(work, n=1)]
    assert groups == [4, 3, 2, 1, 0]


async def test_leaving_the_stream_cancels_the_trajectories_in_flight() -> None:
    server = ScriptedServer(by_row)
    manager = make_manager(by_row, servers=[server], prompt_length=4096)
    work = [{"raw_prompt": user("long " * n)} for n in range(200)]
    clock = asyncio.get_running_loop().time
    async with aclosing(manager.stream(work, n=1)) as stream:
        taken = [await anext(stream) for _ in range(3)]
        left = clock()
    assert [trajectory.group for trajectory in taken] == [0, 1, 2]
    assert clock() - left < 1
    assert (server.num_running, server.num_sessions) == (0, 0)
    assert_no_leases(manager)


async def test_over_sampling_keeps_the_groups_that_end_first() -> None:
    manager = make_manager(by_row, agent={"num_workers": 3})
    work = [{"raw_prompt": user("long " * (8 - n))} for n in range(8)]
    told: list[Trajectory] = []
    trajectories = await manager.run(work, n=2, num_groups=3, on_trajectory=told.append)
    assert_no_leases(manager)
    assert [(t.group, t.rollout) for t in trajectories] == [(g, n) for g in (5, 6, 7) for n in range(2)]
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
async def test_over_sampling_prefers_groups_that_did_not_all_fail(failing: set[str], kept: list[int]) -> None:
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
    agent = {"default_agent_loop": "fails_at_once"}
    manager = make_manager(hello, retries=0, max_failed_share=1.0, agent=agent)
    trajectories = await manager.run(rows(4), n=2, num_groups=2)
    assert [t.group for t in trajectories] == [group for group in kept for _ in range(2)]


COMPLETION = "This answer is long. " * 5
NUM_TOKENS = len(encoded(f"{COMPLETION}<|im_end|>"))


def resumable_manager(agent: str = "partial_tool_agent", **settings: Any) -> AgentLoopManager:
    script = scripted_turns([COMPLETION])
    servers = [ScriptedServer(script, name=f"scripted-{n}", streams=True) for n in range(2)]
    return make_manager(script, servers=servers, agent={"default_agent_loop": agent}, n=2, **settings)


async def run_in_two_parts(manager: AgentLoopManager) -> tuple[list[Trajectory], list[Trajectory]]:
    """Cancel a run after 20 tokens, and resume it under new weights."""
    asyncio.get_running_loop().call_later(20.5 * TOKEN_S, manager.cancel_all)
    first = await manager.run(rows(4))
    await manager.update_weights([], weight_version=1)
    return first, await manager.run(rows(4), earlier=first)


@pytest.mark.parametrize("max_concurrent", [None, 1])
async def test_a_batch_cancelled_for_new_weights_resumes_under_them(max_concurrent: int | None) -> None:
    first, second = await run_in_two_parts(resumable_manager(max_concurrent=max_concurrent))
    lengths = [len(t.output.response_ids) for t in first]
    assert lengths == ([20] * 8 if max_concurrent is None else [20, 20, *[0] * 6])
    assert set(reasons(first)) == {StopReason.CANCELLED}
    assert {t.reward for t in first} == {None}
    for trajectory, length in zip(second, lengths, strict=True):
        assert trajectory.output.stop_reason is StopReason.ANSWERED
        assert trajectory.output.weight_versions.tolist() == [0] * length + [1] * (NUM_TOKENS - length)
    assert [(t.group, t.rollout) for t in second] == [(g, n) for g in range(4) for n in range(2)]


async def test_trajectories_of_a_loop_that_cannot_be_resumed_start_again() -> None:
    first, second = await run_in_two_parts(resumable_manager("single_turn_agent"))
    assert {len(t.output.response_ids) for t in first} == {20}
    assert {tuple(t.output.weight_versions.tolist()) for t in second} == {(1,) * NUM_TOKENS}


async def test_finished_trajectories_are_returned_unchanged_and_reported() -> None:
    manager, received = resumable_manager(), list[Trajectory]()
    manager.cancel_all()  # of no run: a run that begins later is not cancelled
    whole = await manager.run(rows(4))
    assert set(reasons(whole)) == {StopReason.ANSWERED}
    again = await manager.run(rows(4), earlier=whole, on_trajectory=received.append)
    assert again == whole == received
    assert sum(len(server.requests) for server in manager.server_manager.pool.servers) == 8  # pyright: ignore


def test_a_resumed_row_that_is_killed_resumes_from_its_output_and_its_journal(tmp_path: Path) -> None:
    """Check that each call runs once in a row that is cancelled in its second turn and killed in its third."""
    turns = [call_text("book", a=1), call_text("book", a=2), "Both are done."]
    counts, path, [row] = CallCounts(), tmp_path / "journal", rows(1)
    lengths = [len(encoded(f"{turn}<|im_end|>")) * TOKEN_S for turn in turns]

    def make_harness() -> WorkerHarness:
        tool = CountingTool("book", counts, on_replay=OnReplay.ONCE, latency_s=0.1)
        return WorkerHarness(scripted_turns(turns), tools=[tool], agent="partial_tool_agent")

    async def cancelled() -> list[Trajectory]:
        part = make_harness()
        asyncio.get_running_loop().call_later(lengths[0] + 1 + 10.5 * TOKEN_S, part.worker.cancel_all)
        return await part.worker.run([Job(row, 0, 0, {})])

    async def resumed(earlier: list[Trajectory], *, killed_after_s: float | None) -> list[Trajectory]:
        part, is_time = make_harness(), asyncio.Event()
        is_resumed = killed_after_s is None
        async with open_journal(path, key=key_of([row]), rows=[row], resume=is_resumed) as journal:
            _, jobs = split_resumed(journal.divide([Job(row, 0, 0, {})])[1], earlier)
            if killed_after_s is None:
                return await part.worker.run(jobs)
            asyncio.get_running_loop().call_later(killed_after_s, is_time.set)
            with suppress(asyncio.CancelledError):
                await run_while(part.worker.run(jobs), condition=is_time.wait())
        return []

    earlier = run_virtual(cancelled())
    assert counts.ended == {"book": 1}
    run_virtual(resumed(earlier, killed_after_s=lengths[1] - 1))
    assert counts.ended == {"book": 2}
    [trajectory] = run_virtual(resumed(earlier, killed_after_s=None))
    assert counts.started == counts.ended == {"book": 2}
    assert trajectory.output.stop_reason is StopReason.ANSWERED
    assert trajectory.output.answer == "Both are done."
    assert not trajectory.output.incidents

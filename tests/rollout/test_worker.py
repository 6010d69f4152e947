from __future__ import annotations

import asyncio
import math
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from agent_loop.errors import RolloutError, ServerError
from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.rewards.function import RewardFunction
from agent_loop.rollout.failures import FailureBudget
from agent_loop.runtime.isolated_task import num_abandoned
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest
from agent_loop.testing import run_virtual
from agent_loop.trajectory import AgentLoopOutput, IncidentKind, Trajectory
from agent_loop.types import StopReason
from tests.helpers import text_reply, tool_call_reply, user
from tests.rollout.harness import Adder, WorkerHarness


def test_a_failing_trajectory_leaves_its_siblings_untouched() -> None:
    def script(request: ScriptedRequest) -> ScriptedReply:
        first = not harness.server.requests[:-1]
        return ScriptedReply([1], error="down") if first else text_reply("fine", latency_s=1.0)

    harness = WorkerHarness(script)
    trajectories = harness.run([{"raw_prompt": user(str(n))} for n in range(5)])
    assert Counter(t.output.stop_reason for t in trajectories) == {
        StopReason.FAILED: 1,
        StopReason.ANSWERED: 4,
    }


def test_cancelling_the_batch_reaches_every_server_and_tool() -> None:
    tool = Adder({"latency_s": math.inf})
    harness = WorkerHarness(
        lambda request: tool_call_reply("add", a=1, b=2) if request.turn == 0 else text_reply("x"),
        tools=[tool],
    )
    rows = [{"raw_prompt": user(str(n))} for n in range(50)]

    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await harness.worker.run(harness.jobs(rows))
        harness.assert_nothing_is_left()

    run_virtual(scenario())
    assert tool.num_created == tool.num_released == 50


def test_cancelling_one_trajectory_keeps_its_tokens_and_leaves_the_others() -> None:
    harness = WorkerHarness(lambda _: text_reply("abcdefgh", latency_s=10.0))
    rows = [{"raw_prompt": user(str(n))} for n in range(3)]

    async def scenario() -> list[Trajectory]:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(harness.worker.run(harness.jobs(rows)))
            await asyncio.sleep(5)
            assert harness.worker.cancel("group=1/rollout=0")
            assert not harness.worker.cancel("group=9/rollout=0")
        harness.assert_nothing_is_left()
        return running.result()

    trajectories = run_virtual(scenario())
    reasons = [t.output.stop_reason for t in trajectories]
    assert reasons == [StopReason.ANSWERED, StopReason.CANCELLED, StopReason.ANSWERED]
    whole = trajectories[0].output.response_ids.tolist()
    part = trajectories[1].output.response_ids.tolist()
    assert 0 < len(part) < len(whole)
    assert part == whole[: len(part)]
    assert trajectories[1].reward is None


def test_the_first_requests_of_a_large_rollout_do_not_wait_until_all_trajectories_are_set_up() -> None:
    begun: list[int] = []

    def answer(_: ScriptedRequest) -> ScriptedReply:
        begun.append(len(harness.worker.running))
        return text_reply("3", latency_s=5.0)

    harness = WorkerHarness(answer)
    harness.run([{"raw_prompt": user("What is 1 + 2?")}] * 1000)
    assert begun[0] < 200
    assert begun[-1] == 1000


def test_cancelling_all_reaches_trajectories_that_have_not_started() -> None:
    def answer(_: ScriptedRequest) -> ScriptedReply:
        harness.worker.cancel_all()
        return text_reply("3", latency_s=5.0)

    harness = WorkerHarness(answer)
    trajectories = harness.run([{"raw_prompt": user("What is 1 + 2?")}] * 1000)
    assert {t.output.stop_reason for t in trajectories} == {StopReason.CANCELLED}
    assert len(harness.server.requests) < 200


def test_too_many_failures_stop_the_run_with_the_most_common_error_in_full() -> None:
    harness = WorkerHarness(lambda request: ScriptedReply([1], error="disk full", latency_s=1.0))
    rows = [{"raw_prompt": user(str(n))} for n in range(10)]

    async def scenario() -> None:
        budget = FailureBudget(num_trajectories=10, max_share=0.5)
        with pytest.raises(RolloutError, match=r"(?s)6 of 10 trajectories failed.*disk full"):
            await harness.worker.run(harness.jobs(rows), budget=budget)
        harness.assert_nothing_is_left()

    run_virtual(scenario())


def test_the_reward_function_scores_trajectories_without_a_reward_of_their_own() -> None:
    def reward(output: AgentLoopOutput, row: dict[str, Any]) -> dict[str, Any]:
        return {"reward": float(row["truth"] in output.answer), "length": len(output.response_ids)}

    harness = WorkerHarness(lambda _: text_reply("It is 3."), reward=RewardFunction(reward, timeout_s=1))
    right, wrong = harness.run([{"raw_prompt": user("1 + 2"), "truth": truth} for truth in ("3", "4")])
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert right.reward_extra["length"] == len(right.output.response_ids)


@register("token_level")
class TokenLevel(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        prompt_ids = await self.apply_chat_template(row["raw_prompt"])
        out = await self.server_manager.generate(
            "mine", prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=out.token_ids,
            response_mask=[1] * len(out.token_ids),
            response_logprobs=out.log_probs,
            num_turns=2,
        )


@register("forgetful")
class Forgetful(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        return None


def test_a_loop_without_an_episode_is_cancelled_after_its_deadline() -> None:
    harness = WorkerHarness(
        lambda _: text_reply("hi", latency_s=math.inf), agent="token_level", deadline_s=10
    )
    assert harness.run_one().output.stop_reason is StopReason.DEADLINE


def test_rows_select_their_loop_and_an_unknown_name_is_reported() -> None:
    harness = WorkerHarness(lambda _: text_reply("hi"))
    known, unknown = harness.run(
        [{"raw_prompt": user("?"), "agent_name": name} for name in ("single_turn_agent", "singel_turn_agent")]
    )
    assert known.output.stop_reason is StopReason.ANSWERED
    assert unknown.output.failure is not None
    assert "did you mean 'single_turn_agent'" in unknown.output.failure.error


def test_an_abandoned_loop_gets_no_more_completions() -> None:
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

    async def scenario() -> None:
        [trajectory] = await harness.worker.run(harness.jobs([{"raw_prompt": user("go")}]))
        assert trajectory.output.stop_reason is StopReason.DEADLINE
        assert [incident.kind for incident in trajectory.output.incidents] == [IncidentKind.ABANDONED]
        await asyncio.sleep(300)
        assert num_abandoned() == 0
        harness.assert_nothing_is_left()

    run_virtual(scenario())
    assert "the trajectory is over" in str(errors[0])
    assert harness.server.requests == []

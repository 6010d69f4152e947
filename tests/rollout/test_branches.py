from __future__ import annotations

from typing import Any

import numpy as np

from agent_loop.config import MultiTurnConfig
from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.rewards.function import RewardFunction
from agent_loop.rollout.batch import assemble
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest
from agent_loop.trajectory import AgentLoopOutput, Trajectory
from agent_loop.types import Origin, StopReason, ToolCall
from tests.helpers import encoded, text_reply, tool_call_reply, user
from tests.rollout.harness import Adder, WorkerHarness


@register("best_of_two")
class BestOfTwo(AgentLoopBase):
    """Loop that samples one shared turn and then two answers in branches."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        async with self.episode(row["raw_prompt"]) as episode:
            await episode.generate(sampling_params)
            await episode.observe(user("go on"))
            async with episode.branch() as other:
                await other.generate(sampling_params)
                second = other.output()
            await episode.generate(sampling_params)
            return [episode.output(), second]


@register("tools_in_branches")
class ToolsInBranches(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        add = ToolCall("add", {"a": 1, "b": 2})
        async with self.episode(row["raw_prompt"], tools=self.context.tools) as episode:
            await episode.generate(sampling_params)
            await episode.call_tools([add])
            async with episode.branch() as other:
                await other.call_tools([add])
                await other.finish()
            await episode.finish()
            return [episode.output(), other.output()]


def script(request: ScriptedRequest) -> ScriptedReply:
    count = len(requests_seen)
    requests_seen.append(request)
    return text_reply(f"answer {count}")


requests_seen: list[ScriptedRequest] = []


def run_best_of_two(reward: Any = lambda output, row: 1.0) -> list[Trajectory]:
    requests_seen.clear()
    harness = WorkerHarness(script, agent="best_of_two", reward=RewardFunction(reward, timeout_s=1))
    return harness.run([{"raw_prompt": user("?")}])


def test_a_loop_may_return_several_outputs_for_one_row() -> None:
    first, second = run_best_of_two()
    assert [first.trajectory_id, second.trajectory_id] == [
        "group=0/rollout=0/branch=0",
        "group=0/rollout=0/branch=1",
    ]
    assert first.output.answer == "answer 2"
    assert second.output.answer == "answer 1"
    assert first.output.stop_reason is second.output.stop_reason is StopReason.ANSWERED
    assert [m["role"] for m in second.output.messages] == ["user", "assistant", "user", "assistant"]


def test_branches_share_the_segments_of_their_common_prefix() -> None:
    first, second = run_best_of_two()
    assert [a is b for a, b in zip(first.output.segments, second.output.segments, strict=True)] == [
        True,
        True,
        True,
        False,
    ]
    record = np.concatenate([s.token_ids for s in second.output.segments]).tolist()
    assert record[: len(requests_seen[1].prompt_ids)] == requests_seen[1].prompt_ids.tolist()
    assert requests_seen[1].request_id != requests_seen[0].request_id


def test_tokens_shared_by_branches_are_trained_once() -> None:
    batch = assemble(run_best_of_two(), pad_token_id=0)
    num_shared, num_own = len(encoded("answer 0<|im_end|>")), len(encoded("answer 1<|im_end|>"))
    assert batch["response_mask"].sum(dim=1).tolist() == [num_shared + num_own, num_own]
    assert batch["group"].tolist() == [0, 0]
    assert batch["rollout"].tolist() == [0, 0]
    assert batch["branch"].tolist() == [0, 1]


def test_tokens_shared_with_an_unscored_branch_are_trained_in_the_next_branch() -> None:
    def reward(output: AgentLoopOutput, row: Any) -> float:
        if output.answer == "answer 2":
            raise ValueError
        return 1.0

    trajectories = run_best_of_two(reward)
    assert [t.reward for t in trajectories] == [None, 1.0]
    batch = assemble(trajectories, pad_token_id=0)
    num_shared, num_own = len(encoded("answer 0<|im_end|>")), len(encoded("answer 1<|im_end|>"))
    assert batch["response_mask"].sum(dim=1).tolist() == [num_shared + num_own] * 2


def test_each_branch_has_its_own_tool_instances_and_all_are_released() -> None:
    tool = Adder()
    harness = WorkerHarness(
        lambda _: tool_call_reply("add", a=1, b=2),
        agent="tools_in_branches",
        tools=[tool],
        multi_turn=MultiTurnConfig(),
    )
    first, second = harness.run([{"raw_prompt": user("?")}])
    assert (tool.num_created, tool.num_released) == (2, 2)
    assert first.output.response_segments[0] is second.output.response_segments[0]
    assert [s.origin for s in second.output.response_segments] == [Origin.MODEL]

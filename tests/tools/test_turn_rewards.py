"""Rewards of turns: their position at the turn's last token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_loop.interactions.base import BaseInteraction
from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.recording.serialization import deserialize_trajectories, serialize_trajectories
from agent_loop.recording.values import pack, unpack
from agent_loop.rewards.function import RewardFunction
from agent_loop.rollout.batch import assemble
from agent_loop.tools.base import BaseTool, ToolResponse
from agent_loop.training.step_metrics import feedback_metrics
from agent_loop.trajectory import AgentLoopOutput, IncidentKind, Trajectory
from agent_loop.types import Message, Origin, ToolCall
from tests.helpers import call_text, encoded, text_reply, tool_call_reply, user
from tests.rollout.harness import WorkerHarness, as_line
from tests.tools.harness import tool_schema


class Payer(BaseTool):
    """Tool whose calls get the reward in their arguments."""

    on_replay = "recorded"

    def __init__(self, name: str) -> None:
        super().__init__({}, tool_schema(name, reward={"type": ["number", "null"]}))

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        return ToolResponse(text="paid"), parameters["reward"], {"width": 3, "note": "x"}


def pay(reward: float) -> list[ToolCall]:
    return [ToolCall("gold", {"reward": reward})]


class Critic(BaseInteraction):
    async def generate_response(
        self, instance_id: str, messages: Sequence[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        return True, "", 0.75, {"mood": "good"}


def reward_one(output: AgentLoopOutput, row: Any) -> float:
    return 1.0


def ends_of_turns(trajectory: Trajectory) -> list[int]:
    """Return the index in the response at which each run of sampled tokens ends."""
    mask = [*trajectory.output.response_mask.tolist(), 0]
    return [place for place in range(len(mask) - 1) if mask[place] and not mask[place + 1]]


def test_two_tools_and_an_interaction_in_three_turns() -> None:
    first = text_reply(call_text("gold", reward=0.5) + "\n" + call_text("silver", reward=0.25))
    second = tool_call_reply("silver", reward=0.0)
    harness = WorkerHarness(
        [first, second, text_reply("done")],
        tools=[Payer("gold"), Payer("silver")],
        interactions={"critic": Critic({"name": "critic"})},
        reward=RewardFunction(reward_one, timeout_s=1),
    )
    trajectory = harness.run_one(interaction_kwargs={"name": "critic"})
    output, ends = trajectory.output, ends_of_turns(trajectory)
    assert len(ends) == 3
    assert output.tool_rewards == (0.5, 0.25, 0.0)
    assert output.turn_scores == (0.75,)
    assert [(f.origin, f.name, f.place, f.reward) for f in output.feedback] == [
        (Origin.TOOL, "gold", ends[0], 0.5),
        (Origin.TOOL, "silver", ends[0], 0.25),
        (Origin.TOOL, "silver", ends[1], 0.0),
        (Origin.INTERACTION, "", ends[2], 0.75),
    ]
    assert [dict(f.extra) for f in output.feedback] == [{"width": 3, "note": "x"}] * 3 + [{"mood": "good"}]
    batch = assemble([trajectory], pad_token_id=0, response_width=len(output.response_ids) + 5)
    rewards, has_reward = batch["turn_rewards"][0], batch["has_turn_reward"][0]
    assert has_reward.nonzero().flatten().tolist() == ends
    assert rewards[ends].tolist() == [0.75, 0.0, 0.75]
    assert float(rewards.sum()) == 1.5
    assert batch["response_mask"][0][ends].all()
    assert batch["feedback"][0] == output.feedback


def test_calls_without_a_reward_leave_the_columns_empty_and_are_counted() -> None:
    script = [tool_call_reply("gold", reward=None), tool_call_reply("gone"), text_reply("done")]
    trajectory = WorkerHarness(script, tools=[Payer("gold")]).run_one()
    batch = assemble([trajectory], pad_token_id=0)
    assert not batch["has_turn_reward"].any()
    assert not batch["turn_rewards"].any()
    assert [f.incident for f in trajectory.output.feedback] == [None, IncidentKind.UNKNOWN_TOOL]
    expected = {"calls": 1.0, "failed_share": 0.0, "width/mean": 3.0}
    assert feedback_metrics([trajectory]) == {f"tools/gold/{key}": value for key, value in expected.items()}


@register("forks_after_pay")
class ForksAfterPay(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        async with self.episode(row["raw_prompt"], tools=self.context.tools) as episode:
            await episode.generate(sampling_params)
            before_pay = episode.mark()
            await episode.call_tools(pay(0.5))
            await episode.observe([{"role": "tool", "content": "paid"}])
            async with episode.branch() as other:
                await other.generate(sampling_params)
                await other.call_tools(pay(0.125))
                await other.finish()
            await episode.generate(sampling_params)
            await episode.call_tools(pay(2.0))
            await episode.finish()
            async with episode.branch(at=before_pay) as unpaid:
                await unpaid.finish()
            return [episode.output(), other.output(), unpaid.output()]


def run_forks() -> list[Trajectory]:
    harness = WorkerHarness(
        lambda request: tool_call_reply("gold", reward=request.turn),
        tools=[Payer("gold")],
        agent="forks_after_pay",
        reward=RewardFunction(reward_one, timeout_s=1),
    )
    return harness.run([{"raw_prompt": user("?")}])


def test_a_branch_has_the_rewards_of_the_turns_it_shares_and_its_own() -> None:
    trajectories = run_forks()
    trunk_end = len(encoded(call_text("gold", reward=0) + "<|im_end|>")) - 1
    found = [[(f.place, f.reward) for f in t.output.feedback] for t in trajectories]
    ends = [ends_of_turns(t) for t in trajectories]
    assert ends[0][0] == ends[1][0] == trunk_end
    assert found[0] == [(trunk_end, 0.5), (ends[0][1], 2.0)]
    assert found[1] == [(trunk_end, 0.5), (ends[1][1], 0.125)]
    assert found[2] == []
    batch = assemble(trajectories, pad_token_id=0)
    assert batch["turn_rewards"][:, trunk_end].tolist() == [0.5, 0.5, 0.0]
    assert batch["response_mask"][:, trunk_end].tolist() == [1, 0, 0], "trained once, so credited once"
    assert batch["turn_rewards"].sum(dim=1).tolist() == [2.5, 0.625, 0.0]


def test_feedback_survives_the_journal_and_is_written_to_records() -> None:
    [trajectory, *_] = run_forks()
    form = unpack(pack(serialize_trajectories([trajectory])))
    [read] = deserialize_trajectories(form, row=trajectory.row, group=0, rollout=0)
    assert read.output.feedback == trajectory.output.feedback
    record = as_line(trajectory)
    assert record["feedback"][0]["place"] == trajectory.output.feedback[0].place


def test_a_call_before_the_first_sampled_token_belongs_to_no_turn() -> None:
    @register("calls_first")
    class CallsFirst(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
            async with self.episode(row["raw_prompt"], tools=self.context.tools) as episode:
                await episode.call_tools(pay(1.0))
                await episode.generate(sampling_params)
                await episode.finish()
                return episode.output()

    assert CallsFirst
    trajectory = WorkerHarness([text_reply("hello")], tools=[Payer("gold")], agent="calls_first").run_one()
    assert [(f.place, f.reward) for f in trajectory.output.feedback] == [(None, 1.0)]
    assert not assemble([trajectory], pad_token_id=0)["has_turn_reward"].any()

"""Overridden handlers of the tool loop, and the state that handlers can read."""

from __future__ import annotations

from typing import Any

import pytest

from agent_loop.interactions.base import BaseInteraction
from agent_loop.loops import ToolAgentLoop
from agent_loop.loops.agent_data import AgentData
from agent_loop.loops.registry import register
from agent_loop.types import AgentState, StopReason
from tests.helpers import hermes_template, roles, text_reply, tool_call_reply, user
from tests.rollout.harness import Adder, WorkerHarness


class Doubter(BaseInteraction):
    """Interaction that asks `Sure?` once and then ends the conversation."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        is_over = len([m for m in messages if m["role"] == "assistant"]) > 2
        return is_over, "Sure?", 1.0 if is_over else 0.25, {}


@register("watched")
class Watched(ToolAgentLoop):
    """Loop that records the state after each handler."""

    async def _handle_pending_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any]
    ) -> AgentState:
        self.seen: list[dict[str, Any]] = []
        assert agent_data.messages == user("What is 1 + 2?")
        assert (agent_data.prompt_ids, agent_data.response_ids, agent_data.tool_calls) == ([], [], [])
        return self._keep(await super()._handle_pending_state(agent_data, sampling_params), agent_data)

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any]
    ) -> AgentState:
        return self._keep(await super()._handle_generating_state(agent_data, sampling_params), agent_data)

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        return self._keep(await super()._handle_processing_tools_state(agent_data), agent_data)

    async def _handle_interacting_state(self, agent_data: AgentData) -> AgentState:
        return self._keep(await super()._handle_interacting_state(agent_data), agent_data)

    def _keep(self, state: AgentState, data: AgentData) -> AgentState:
        assert len(data.response_ids) == len(data.response_mask) == len(data.response_logprobs or [])
        self.seen.append(
            {
                "state": str(data.state),
                "roles": roles(data.messages),
                "turns": (data.assistant_turns, data.user_turns),
                "mask": sum(data.response_mask),
                "calls": [call.name for call in data.tool_calls],
                "tool_rewards": data.tool_rewards,
                "turn_scores": data.turn_scores,
            }
        )
        data.extra_fields["seen"] = self.seen
        return state


def test_the_state_can_be_read_in_each_handler() -> None:
    harness = WorkerHarness(
        [tool_call_reply("add", a=1, b=2), text_reply("3"), text_reply("3!")],
        tools=[Adder({"reward": 0.5})],
        interactions={"doubter": Doubter({"name": "doubter"})},
        agent="watched",
    )
    output = harness.run_one(interaction_kwargs={"name": "doubter"}).output
    assert output.stop_reason is StopReason.INTERACTION_FINISHED
    seen = output.extra_fields["seen"]
    assert [each["state"] for each in seen] == [
        "pending",
        "generating",
        "processing_tools",
        "generating",
        "interacting",
        "generating",
        "interacting",
    ]
    assert [each["turns"] for each in seen] == [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2), (3, 2), (3, 2)]
    assert seen[1]["calls"] == ["add"]
    assert seen[2]["tool_rewards"] == [0.5]
    assert seen[2]["roles"] == ["user", "assistant", "tool"]
    assert [each["turn_scores"] for each in seen[4:]] == [[0.25], [0.25], [0.25, 1.0]]
    assert seen[-1]["mask"] == output.response_mask.sum()
    assert output.extra_fields["turn_scores"] == list(output.turn_scores) == [0.25, 1.0]
    assert output.extra_fields["tool_rewards"] == list(output.tool_rewards) == [0.5]


def test_the_prompt_can_be_changed_before_it_is_rendered() -> None:
    @register("briefed")
    class Briefed(ToolAgentLoop):
        async def _handle_pending_state(
            self, agent_data: AgentData, sampling_params: dict[str, Any]
        ) -> AgentState:
            agent_data.messages.insert(0, {"role": "system", "content": "Be brief."})
            return await super()._handle_pending_state(agent_data, sampling_params)

    row = {"raw_prompt": user("What is 1 + 2?")}
    output = WorkerHarness([text_reply("3")], agent="briefed").run_one(**row).output
    assert "Be brief." in hermes_template().decode(output.prompt_ids)
    assert row["raw_prompt"] == user("What is 1 + 2?")


def test_a_single_handler_can_be_overridden() -> None:
    @register("refuses_tools")
    class RefusesTools(ToolAgentLoop):
        async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
            episode = agent_data.episode
            was_added = await episode.observe([{"role": "tool", "content": "No tools today."}])
            return AgentState.GENERATING if was_added else AgentState.TERMINATED

    tool = Adder()
    output = (
        WorkerHarness(
            [tool_call_reply("add", a=1, b=2), text_reply("Three.")], tools=[tool], agent="refuses_tools"
        )
        .run_one()
        .output
    )
    assert output.answer == "Three."
    assert tool.executed == []


def test_a_handler_may_end_the_trajectory() -> None:
    @register("answers_once")
    class AnswersOnce(ToolAgentLoop):
        async def _handle_generating_state(
            self, agent_data: AgentData, sampling_params: dict[str, Any]
        ) -> AgentState:
            await super()._handle_generating_state(agent_data, {**sampling_params, "temperature": 0.0})
            return AgentState.TERMINATED

    harness = WorkerHarness([tool_call_reply("add", a=1, b=2)], tools=[Adder()], agent="answers_once")
    output = harness.run_one().output
    assert output.num_assistant_turns == 1
    assert harness.server.requests[0].sampling_params.temperature == 0.0


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        (None, "returned None; return an AgentState"),
        ("resting", "returned 'resting'"),
        (AgentState.PENDING, "PENDING comes once"),
        (AgentState.PROCESSING_TOOLS, "PROCESSING_TOOLS comes after an assistant turn"),
    ],
)
def test_a_handler_that_returns_no_next_state_fails_its_trajectory(returned: Any, complaint: str) -> None:
    @register("lost")
    class Lost(ToolAgentLoop):
        async def _handle_pending_state(
            self, agent_data: AgentData, sampling_params: dict[str, Any]
        ) -> AgentState:
            await super()._handle_pending_state(agent_data, sampling_params)
            return returned

    output = WorkerHarness([text_reply("3")], tools=[Adder()], agent="lost").run_one().output
    assert output.failure is not None
    assert complaint in output.failure.error

"""The tool loop: calls and their replies, malformed calls, limits, deadlines and interactions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from agent_loop.config import MultiTurnConfig
from agent_loop.errors import ToolError
from agent_loop.interactions.base import BaseInteraction
from agent_loop.loops.tool_agent import MAX_MALFORMED_REPLIES
from agent_loop.servers.scripted import ScriptedReply
from agent_loop.tools.base import trajectory_of
from agent_loop.trajectory import IncidentKind, Trajectory
from agent_loop.types import Message, Origin, StopReason
from tests.helpers import call_text, encoded, hermes_template, roles, text_reply, tool_call_reply
from tests.rollout.harness import Adder, WorkerHarness

ADD = tool_call_reply("add", a=1, b=2)
ANSWER = text_reply("It is 3.")


def kinds(trajectory: Trajectory) -> list[IncidentKind]:
    return [incident.kind for incident in trajectory.output.incidents]


def replies(trajectory: Trajectory) -> list[str]:
    return [message["content"] for message in trajectory.output.messages if message["role"] == "tool"]


def assert_record_matches_requests(trajectory: Trajectory, harness: WorkerHarness) -> None:
    """Check that the context of each request is a prefix of the trajectory's tokens."""
    record = np.concatenate([segment.token_ids for segment in trajectory.output.segments])
    for request in harness.server.requests:
        assert record[: len(request.prompt_ids)].tolist() == request.prompt_ids.tolist()
    output = trajectory.output
    assert len(output.response_ids) == len(output.response_mask) == len(output.weight_versions)


def test_a_call_is_run_and_its_reply_reaches_the_model_before_the_answer() -> None:
    tool = Adder()
    harness = WorkerHarness([ADD, ANSWER], tools=[tool])
    trajectory = harness.run_one()
    output = trajectory.output
    assert output.stop_reason is StopReason.ANSWERED
    assert output.answer == "It is 3."
    assert roles(output.messages) == ["user", "assistant", "tool", "assistant"]
    assert replies(trajectory) == ["3"]
    assert [s.origin for s in output.segments] == [Origin.PROMPT, Origin.MODEL, Origin.TOOL, Origin.MODEL]
    assert output.num_turns == 4
    assert output.incidents == ()
    assert (tool.num_created, tool.num_released) == (1, 1)
    assert_record_matches_requests(trajectory, harness)
    sampled = hermes_template().decode(output.response_ids[output.response_mask == 1])
    assert sampled == hermes_template().decode([*ADD.token_ids, *ANSWER.token_ids])


def test_calls_beyond_max_parallel_calls_queue_and_all_are_answered() -> None:
    tool = Adder({"latency_s": 1.0})
    three = text_reply("".join(call_text("add", a=n, b=n) for n in (1, 2, 3)))
    harness = WorkerHarness([three, ANSWER], tools=[tool], multi_turn=MultiTurnConfig(max_parallel_calls=2))
    trajectory = harness.run_one()
    assert replies(trajectory) == ["2", "4", "6"]
    assert tool.max_concurrent_calls == 2
    assert tool.num_created == 1
    assert trajectory.output.metrics.tool_calls == 2.0


def test_the_reply_to_a_malformed_call_states_the_error() -> None:
    trajectory = WorkerHarness(
        [text_reply('<tool_call>{"name": "add"</tool_call>'), ANSWER], tools=[Adder()]
    ).run_one()
    assert "not valid JSON" in replies(trajectory)[0]
    assert kinds(trajectory) == [IncidentKind.INVALID_TURN, IncidentKind.MALFORMED_CALL]
    assert trajectory.output.stop_reason is StopReason.ANSWERED


def test_a_thousand_malformed_calls_get_a_few_replies_and_a_count_of_the_rest() -> None:
    many = text_reply("<tool_call>oops</tool_call>" * 1000 + call_text("add", a=1, b=2))
    trajectory = WorkerHarness([many, ANSWER], tools=[Adder()], response_length=50_000).run_one()
    *errors, result, rest = replies(trajectory)
    assert len(errors) == MAX_MALFORMED_REPLIES
    assert result == "3"
    assert rest == f"Error: {1000 - MAX_MALFORMED_REPLIES} more calls cannot be read either"
    assert kinds(trajectory).count(IncidentKind.MALFORMED_CALL) == 1000


def test_turns_with_only_malformed_calls_end_the_episode_after_max_invalid_turns() -> None:
    harness = WorkerHarness(
        lambda _: text_reply("<tool_call>oops</tool_call>"),
        tools=[Adder()],
        multi_turn=MultiTurnConfig(max_invalid_turns=2),
    )
    trajectory = harness.run_one()
    assert trajectory.output.stop_reason is StopReason.MAX_INVALID_TURNS
    assert len(harness.server.requests) == 3


def test_an_unknown_tool_is_answered_with_the_nearest_name() -> None:
    trajectory = WorkerHarness([tool_call_reply("ad", a=1), ANSWER], tools=[Adder()]).run_one()
    assert "'add'" in replies(trajectory)[0]
    assert kinds(trajectory) == [IncidentKind.UNKNOWN_TOOL]


def test_invalid_arguments_are_answered_and_do_not_reach_the_tool() -> None:
    tool = Adder()
    trajectory = WorkerHarness([tool_call_reply("add", a="one"), ANSWER], tools=[tool]).run_one()
    assert tool.executed == []
    assert kinds(trajectory) == [IncidentKind.INVALID_ARGUMENTS]
    assert trajectory.output.stop_reason is StopReason.ANSWERED


def test_a_tool_error_is_reported_to_the_model() -> None:
    tool = Adder({"raises": ToolError("the abacus is broken")})
    trajectory = WorkerHarness([ADD, ANSWER], tools=[tool]).run_one()
    assert replies(trajectory) == ["the abacus is broken"]
    assert kinds(trajectory) == [IncidentKind.TOOL_ERROR]


def test_any_other_exception_in_a_tool_fails_the_trajectory_as_a_bug_of_the_tool() -> None:
    tool = Adder({"raises": ZeroDivisionError("boom")})
    trajectory = WorkerHarness([ADD, ANSWER], tools=[tool]).run_one()
    failure = trajectory.output.failure
    assert trajectory.output.stop_reason is StopReason.FAILED
    assert failure is not None
    assert "ToolBug" in failure.error
    assert "ZeroDivisionError: boom" in failure.traceback
    assert trajectory.reward is None
    assert tool.open == set()
    assert trajectory.output.response_mask.sum() == len(ADD.token_ids), "the sampled tokens are kept"


def test_a_hung_tool_is_answered_and_released() -> None:
    tool = Adder({"latency_s": math.inf})
    multi_turn = MultiTurnConfig(tool_timeout_s=5)
    trajectory = WorkerHarness([ADD, ANSWER], tools=[tool], multi_turn=multi_turn).run_one()
    assert kinds(trajectory) == [IncidentKind.TOOL_TIMEOUT]
    assert trajectory.output.stop_reason is StopReason.ANSWERED
    assert trajectory.output.metrics.tool_calls == 5.0
    assert tool.open == set()


def test_a_failing_release_is_recorded_and_changes_nothing_else() -> None:
    tool = Adder({"release_raises": OSError("socket gone"), "verdict": 0.5})
    trajectory = WorkerHarness([ADD, ANSWER], tools=[tool]).run_one()
    assert kinds(trajectory) == [IncidentKind.CLOSE_FAILED]
    assert "socket gone" in trajectory.output.incidents[0].detail
    assert trajectory.output.stop_reason is StopReason.ANSWERED
    assert trajectory.reward == 0.5


def bridge_length(text: str) -> int:
    message: Message = {"role": "tool", "content": text, "name": "add"}
    return len(hermes_template().bridge([message], last_token_id=ADD.token_ids[-1]))


def test_a_reply_that_does_not_fit_is_reported() -> None:
    limit = len(ADD.token_ids) + bridge_length("3") - 1
    trajectory = WorkerHarness([ADD], tools=[Adder()], response_length=limit).run_one()
    assert trajectory.output.stop_reason is StopReason.RESPONSE_LENGTH
    assert trajectory.output.response_ids.tolist() == list(ADD.token_ids)
    assert kinds(trajectory) == [IncidentKind.DROPPED_OBSERVATION]


def test_a_long_reply_is_cut_to_its_limit_in_tokens_marker_included() -> None:
    tool = Adder({"says": "quick brown fox " * 200})
    multi_turn = MultiTurnConfig(max_tool_response_length=20)
    trajectory = WorkerHarness([ADD, ANSWER], tools=[tool], multi_turn=multi_turn).run_one()
    [reply] = replies(trajectory)
    assert len(encoded(reply)) <= 20
    assert "(truncated)" in reply
    assert kinds(trajectory) == [IncidentKind.TRUNCATED_REPLY]


def test_the_last_turn_stops_when_it_opens_a_call_since_the_call_could_not_run() -> None:
    tool = Adder()
    harness = WorkerHarness([ADD, ADD], tools=[tool], multi_turn=MultiTurnConfig(max_user_turns=1))
    trajectory = harness.run_one()
    assert trajectory.output.stop_reason is StopReason.MAX_USER_TURNS
    assert len(tool.executed) == 1
    assert trajectory.output.response_ids[-1] == encoded("<tool_call>")[0]
    assert kinds(trajectory) == [IncidentKind.UNEXECUTED_CALL]


def test_a_call_on_the_last_assistant_turn_is_reported_and_not_run() -> None:
    tool = Adder()
    harness = WorkerHarness([ADD], tools=[tool], multi_turn=MultiTurnConfig(max_assistant_turns=1))
    trajectory = harness.run_one()
    assert trajectory.output.stop_reason is StopReason.MAX_ASSISTANT_TURNS
    assert tool.executed == []


def test_an_answer_cut_by_length_does_not_have_the_stop_reason_answered() -> None:
    trajectory = WorkerHarness([ANSWER], response_length=3).run_one()
    assert trajectory.output.stop_reason is StopReason.RESPONSE_LENGTH
    assert kinds(trajectory) == [IncidentKind.CUT_TURN]


def test_a_complete_call_before_a_cut_turn_is_run_and_the_turn_is_closed() -> None:
    cut = text_reply(call_text("add", a=1, b=2) + " and then", ends=False)
    harness = WorkerHarness([cut, ANSWER], tools=[Adder()])
    trajectory = harness.run_one()
    assert trajectory.output.stop_reason is StopReason.ANSWERED
    text = hermes_template().decode(trajectory.output.response_ids)
    assert "and then<|im_end|>\n<|im_start|>user\n<tool_response>\n3" in text
    assert_record_matches_requests(trajectory, harness)


def test_a_prompt_over_its_limit_ends_the_episode_before_anything_is_sent() -> None:
    harness = WorkerHarness([ANSWER], prompt_length=3)
    trajectory = harness.run_one()
    assert trajectory.output.stop_reason is StopReason.PROMPT_LENGTH
    assert harness.server.requests == []
    assert kinds(trajectory) == [IncidentKind.TRUNCATED_PROMPT]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_long_prompt_is_truncated_on_the_configured_side(side: str) -> None:
    harness = WorkerHarness([ANSWER], prompt_length=3, truncate_prompt=side)
    trajectory = harness.run_one()
    full = hermes_template().open([{"role": "user", "content": "What is 1 + 2?"}])
    expected = full[-3:] if side == "left" else full[:3]
    assert trajectory.output.prompt_ids.tolist() == expected.tolist()
    assert trajectory.output.stop_reason is StopReason.ANSWERED


def test_a_tool_can_end_the_episode() -> None:
    trajectory = WorkerHarness([ADD], tools=[Adder({"ends": True, "verdict": 1.0})]).run_one()
    assert trajectory.output.stop_reason is StopReason.TOOL_FINISHED
    assert trajectory.reward == 1.0
    assert trajectory.output.response_ids.tolist() == list(ADD.token_ids)


def test_a_deadline_ends_the_trajectory_and_keeps_the_sampled_tokens() -> None:
    slow = ScriptedReply(ANSWER.token_ids, latency_s=len(ANSWER.token_ids) * 1.0)
    trajectory = WorkerHarness([ADD, slow], tools=[Adder({"latency_s": 1.0})], deadline_s=4.5).run_one()
    assert trajectory.output.stop_reason is StopReason.DEADLINE
    sampled = trajectory.output.response_ids[trajectory.output.response_mask == 1]
    assert sampled.tolist() == [*ADD.token_ids, *ANSWER.token_ids[:3]]


def test_a_deadline_reaches_a_hung_tool() -> None:
    tool = Adder({"latency_s": math.inf})
    trajectory = WorkerHarness([ADD], tools=[tool], deadline_s=3).run_one()
    assert trajectory.output.stop_reason is StopReason.DEADLINE
    assert tool.open == set()
    assert trajectory.output.metrics.total == 3.0


class Patient(BaseInteraction):
    """Interaction that asks for another try until the answer contains the right number."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.open: set[str] = set()

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self.open.add(instance_id)

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        is_right = self.config["truth"] in messages[-1]["content"]
        return is_right, "" if is_right else "Try again.", float(is_right), {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        return 0.75

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self.open.discard(instance_id)


def test_an_interaction_replies_to_turns_without_a_call() -> None:
    patient = Patient({"name": "patient", "truth": "3"})
    harness = WorkerHarness(
        [text_reply("2?"), ADD, ANSWER], tools=[Adder()], interactions={"patient": patient}
    )
    trajectory = harness.run_one(interaction_kwargs={"name": "patient"})
    output = trajectory.output
    assert output.stop_reason is StopReason.INTERACTION_FINISHED
    assert roles(output.messages) == ["user", "assistant", "user", "assistant", "tool", "assistant"]
    assert output.turn_scores == (0.0, 1.0)
    assert trajectory.reward == 0.75
    assert [s.origin for s in output.response_segments].count(Origin.INTERACTION) == 1
    assert patient.open == set()
    assert_record_matches_requests(trajectory, harness)


def test_the_tools_and_the_interaction_of_a_trajectory_have_the_same_id_and_no_other_trajectory_has_it() -> (
    None
):
    ids: list[list[str]] = []

    class Shared(Adder):
        async def create(self, instance_id: str, **kwargs: Any) -> None:
            ids.append([instance_id])
            await super().create(instance_id, **kwargs)

    class Sharing(Patient):
        async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
            ids[-1].append(instance_id)
            await super().start_interaction(instance_id, **kwargs)

    for _ in range(2):
        patient = Sharing({"name": "patient", "truth": "3"})
        harness = WorkerHarness([ADD, ANSWER], tools=[Shared()], interactions={"patient": patient})
        harness.run_one(interaction_kwargs={"name": "patient"})
    trajectories = [{trajectory_of(instance_id) for instance_id in both} for both in ids]
    assert [len(both) for both in ids] == [2, 2]
    assert [len(trajectory) for trajectory in trajectories] == [1, 1]
    assert trajectories[0] != trajectories[1]


def test_calls_inside_reasoning_are_not_run() -> None:
    tool = Adder()
    trajectory = WorkerHarness(
        [text_reply(f"<think>{call_text('add', a=1, b=2)}</think>3")], tools=[tool]
    ).run_one()
    assert tool.executed == []
    assert trajectory.output.answer == "3"

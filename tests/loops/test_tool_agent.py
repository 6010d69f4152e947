"""The tool loop: calls and their replies, limits, deadlines, interactions, and handlers that users override."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_loop.config import MultiTurnConfig
from agent_loop.errors import ConfigError, DataError, ToolError
from agent_loop.interactions.base import BaseInteraction
from agent_loop.loops import SingleTurnAgentLoop, ToolAgentLoop, registry
from agent_loop.loops.agent_data import AgentData
from agent_loop.loops.registry import LoopRegistry, register
from agent_loop.loops.tool_agent import MAX_MALFORMED_REPLIES
from agent_loop.servers.scripted import ScriptedReply
from agent_loop.tools.base import trajectory_of
from agent_loop.trajectory import IncidentKind, Trajectory
from agent_loop.types import AgentState, Message, Origin, StopReason
from tests.helpers import call_text, encoded, hermes_template, roles, text_reply, tool_call_reply, user
from tests.rollout.harness import Adder, WorkerHarness, error_of, kinds, replies

ADD = tool_call_reply("add", a=1, b=2)
ANSWER = text_reply("It is 3.")
MALFORMED = text_reply('<tool_call>{"name": "add"</tool_call>')


def assert_record_matches_requests(trajectory: Trajectory, harness: WorkerHarness) -> None:
    """Check that the context of each request is a prefix of the trajectory's tokens."""
    output = trajectory.output
    record = np.concatenate([segment.token_ids for segment in output.segments])
    for request in harness.server.requests:
        assert record[: len(request.prompt_ids)].tolist() == request.prompt_ids.tolist()
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


def bridge_length(text: str) -> int:
    message: Message = {"role": "tool", "content": text, "name": "add"}
    return len(hermes_template().bridge([message], last_token_id=ADD.token_ids[-1]))


@dataclass(frozen=True)
class Case:
    """Completions with their incidents, and how the trajectory ends."""

    script: list[ScriptedReply]
    incidents: list[IncidentKind]
    reply: str | None = None
    """Part of the first reply of a tool. None if there is no reply."""
    reason: StopReason = StopReason.ANSWERED
    num_executed: int = 0
    tool: dict[str, Any] = field(default_factory=dict[str, Any])
    multi_turn: dict[str, Any] = field(default_factory=dict[str, Any])
    limits: dict[str, Any] = field(default_factory=dict[str, Any])


K, R = IncidentKind, StopReason
NOT_A_CALL = [K.INVALID_TURN, K.MALFORMED_CALL]
UNFIT = {"response_length": len(ADD.token_ids) + bridge_length("3") - 1}
CASES = {
    "malformed call": Case([MALFORMED, ANSWER], NOT_A_CALL, "not valid JSON"),
    "many malformed turns": Case(
        [MALFORMED] * 3, NOT_A_CALL * 3, "JSON", R.MAX_INVALID_TURNS, multi_turn={"max_invalid_turns": 2}
    ),
    "unknown tool": Case([tool_call_reply("ad", a=1), ANSWER], [K.UNKNOWN_TOOL], "'add'"),
    "invalid arguments": Case([tool_call_reply("add", a="one"), ANSWER], [K.INVALID_ARGUMENTS], "one"),
    "tool error": Case(
        [ADD, ANSWER],
        [K.TOOL_ERROR],
        "the abacus is broken",
        num_executed=1,
        tool={"raises": ToolError("the abacus is broken")},
    ),
    "hung tool": Case(
        [ADD, ANSWER],
        [K.TOOL_TIMEOUT],
        "longer than 5",
        num_executed=1,
        tool={"latency_s": math.inf},
        multi_turn={"tool_timeout_s": 5},
    ),
    "reply that does not fit": Case([ADD], [K.DROPPED_OBSERVATION], "3", R.RESPONSE_LENGTH, 1, limits=UNFIT),
    "call on the last user turn": Case(
        [ADD, ADD], [K.UNEXECUTED_CALL], "3", R.MAX_USER_TURNS, 1, multi_turn={"max_user_turns": 1}
    ),
    "call on the last assistant turn": Case(
        [ADD], [K.UNEXECUTED_CALL], reason=R.MAX_ASSISTANT_TURNS, multi_turn={"max_assistant_turns": 1}
    ),
    "cut answer": Case([ANSWER], [K.CUT_TURN], reason=R.RESPONSE_LENGTH, limits={"response_length": 3}),
    "long prompt": Case([], [K.TRUNCATED_PROMPT], reason=R.PROMPT_LENGTH, limits={"prompt_length": 3}),
    "call inside reasoning": Case([text_reply(f"<think>{call_text('add', a=1, b=2)}</think>3")], []),
}


@pytest.mark.parametrize("name", CASES)
def test_turns_that_go_wrong_are_reported_and_answered_or_end_the_episode(name: str) -> None:
    case = CASES[name]
    tool = Adder(case.tool)
    multi_turn = MultiTurnConfig(**case.multi_turn)
    harness = WorkerHarness(case.script, tools=[tool], multi_turn=multi_turn, **case.limits)
    trajectory = harness.run_one()
    assert trajectory.output.stop_reason is case.reason
    assert kinds(trajectory) == case.incidents
    assert bool(replies(trajectory)) == (case.reply is not None)
    assert (case.reply or "") in "".join(replies(trajectory)[:1])
    assert len(tool.executed) == case.num_executed
    assert len(harness.server.requests) == len(case.script)
    assert tool.open == set()


def test_a_thousand_malformed_calls_get_a_few_replies_and_a_count_of_the_rest() -> None:
    many = text_reply("<tool_call>oops</tool_call>" * 1000 + call_text("add", a=1, b=2))
    trajectory = WorkerHarness([many, ANSWER], tools=[Adder()], response_length=50_000).run_one()
    *errors, result, rest = replies(trajectory)
    assert len(errors) == MAX_MALFORMED_REPLIES
    assert result == "3"
    assert rest == f"Error: {1000 - MAX_MALFORMED_REPLIES} more calls cannot be read either"
    assert kinds(trajectory).count(IncidentKind.MALFORMED_CALL) == 1000


def test_any_other_exception_in_a_tool_fails_the_trajectory_as_a_bug_of_the_tool() -> None:
    tool = Adder({"raises": ZeroDivisionError("boom")})
    trajectory = WorkerHarness([ADD, ANSWER], tools=[tool]).run_one()
    assert "ToolBug" in error_of(trajectory)
    assert trajectory.output.failure is not None
    assert "ZeroDivisionError: boom" in trajectory.output.failure.traceback
    assert trajectory.reward is None
    assert tool.open == set()
    assert trajectory.output.response_mask.sum() == len(ADD.token_ids), "the sampled tokens are kept"


def test_a_failing_release_is_recorded_and_changes_nothing_else() -> None:
    tool = Adder({"release_raises": OSError("socket gone"), "verdict": 0.5})
    trajectory = WorkerHarness([ADD, ANSWER], tools=[tool]).run_one()
    assert kinds(trajectory) == [IncidentKind.CLOSE_FAILED]
    assert "socket gone" in trajectory.output.incidents[0].detail
    assert trajectory.output.stop_reason is StopReason.ANSWERED
    assert trajectory.reward == 0.5


def test_a_long_reply_is_cut_to_its_limit_in_tokens_marker_included() -> None:
    tool = Adder({"says": "quick brown fox " * 200})
    multi_turn = MultiTurnConfig(max_tool_response_length=20)
    trajectory = WorkerHarness([ADD, ANSWER], tools=[tool], multi_turn=multi_turn).run_one()
    [reply] = replies(trajectory)
    assert len(encoded(reply)) <= 20
    assert "(truncated)" in reply
    assert kinds(trajectory) == [IncidentKind.TRUNCATED_REPLY]


def test_the_last_turn_stops_when_it_opens_a_call_since_the_call_could_not_run() -> None:
    harness = WorkerHarness([ADD, ADD], tools=[Adder()], multi_turn=MultiTurnConfig(max_user_turns=1))
    assert harness.run_one().output.response_ids[-1] == encoded("<tool_call>")[0]


def test_a_complete_call_before_a_cut_turn_is_run_and_the_turn_is_closed() -> None:
    cut = text_reply(call_text("add", a=1, b=2) + " and then", ends=False)
    harness = WorkerHarness([cut, ANSWER], tools=[Adder()])
    trajectory = harness.run_one()
    assert trajectory.output.stop_reason is StopReason.ANSWERED
    text = hermes_template().decode(trajectory.output.response_ids)
    assert "and then<|im_end|>\n<|im_start|>user\n<tool_response>\n3" in text
    assert_record_matches_requests(trajectory, harness)


def test_a_tool_can_end_the_episode() -> None:
    trajectory = WorkerHarness([ADD], tools=[Adder({"ends": True, "verdict": 1.0})]).run_one()
    assert trajectory.output.stop_reason is StopReason.TOOL_FINISHED
    assert trajectory.reward == 1.0
    assert trajectory.output.response_ids.tolist() == list(ADD.token_ids)


def test_a_deadline_ends_the_trajectory_and_keeps_the_sampled_tokens() -> None:
    slow = ScriptedReply(ANSWER.token_ids, latency_s=len(ANSWER.token_ids) * 1.0)
    output = WorkerHarness([ADD, slow], tools=[Adder({"latency_s": 1.0})], deadline_s=4.5).run_one().output
    assert output.stop_reason is StopReason.DEADLINE
    sampled = output.response_ids[output.response_mask == 1]
    assert sampled.tolist() == [*ADD.token_ids, *ANSWER.token_ids[:3]]


class Patient(BaseInteraction):
    """Interaction that asks for another try until the answer contains the right number."""

    def __init__(self) -> None:
        super().__init__({"name": "patient"})
        self.open: set[str] = set()

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self.open.add(instance_id)

    async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Any:
        is_right = "3" in messages[-1]["content"]
        return is_right, "" if is_right else "Try again.", float(is_right), {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        return 0.75

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self.open.discard(instance_id)


def run_with_patient(
    script: list[ScriptedReply], *, patient: Patient, tool: Adder | None = None, **options: Any
) -> tuple[Trajectory, WorkerHarness]:
    harness = WorkerHarness(script, tools=[tool or Adder()], interactions={"patient": patient}, **options)
    return harness.run_one(interaction_kwargs={"name": "patient"}), harness


def test_an_interaction_replies_to_turns_without_a_call() -> None:
    patient = Patient()
    trajectory, harness = run_with_patient([text_reply("2?"), ADD, ANSWER], patient=patient)
    output = trajectory.output
    assert output.stop_reason is StopReason.INTERACTION_FINISHED
    assert roles(output.messages) == ["user", "assistant", "user", "assistant", "tool", "assistant"]
    assert output.turn_scores == (0.0, 1.0)
    assert trajectory.reward == 0.75
    assert [s.origin for s in output.response_segments].count(Origin.INTERACTION) == 1
    assert patient.open == set()
    assert_record_matches_requests(trajectory, harness)


def test_tools_and_interaction_of_a_trajectory_share_an_id_that_no_other_trajectory_has() -> None:
    ids: list[str] = []

    class Shared(Adder):
        async def create(self, instance_id: str, **kwargs: Any) -> None:
            ids.append(trajectory_of(instance_id))
            await super().create(instance_id, **kwargs)

    class Sharing(Patient):
        async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
            ids.append(trajectory_of(instance_id))
            await super().start_interaction(instance_id, **kwargs)

    for _ in range(2):
        run_with_patient([ADD, ANSWER], patient=Sharing(), tool=Shared())
    assert len(ids) == 4
    assert ids[0] == ids[1] != ids[2] == ids[3]


@register("watched")
class Watched(ToolAgentLoop):
    """Loop that records the state after each handler."""

    async def _handle_pending_state(self, data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        self.seen: list[dict[str, Any]] = []
        assert data.messages == user("What is 1 + 2?")
        assert (data.prompt_ids, data.response_ids, data.tool_calls) == ([], [], [])
        return self._keep(await super()._handle_pending_state(data, sampling_params), data)

    async def _handle_generating_state(self, data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        return self._keep(await super()._handle_generating_state(data, sampling_params), data)

    async def _handle_processing_tools_state(self, data: AgentData) -> AgentState:
        return self._keep(await super()._handle_processing_tools_state(data), data)

    async def _handle_interacting_state(self, data: AgentData) -> AgentState:
        return self._keep(await super()._handle_interacting_state(data), data)

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
    script = [ADD, text_reply("2?"), text_reply("3!")]
    trajectory, _ = run_with_patient(script, patient=Patient(), tool=Adder({"reward": 0.5}), agent="watched")
    output = trajectory.output
    assert output.stop_reason is StopReason.INTERACTION_FINISHED
    seen = output.extra_fields["seen"]
    states = "pending generating processing_tools generating interacting generating interacting"
    assert [each["state"] for each in seen] == states.split()
    assert [each["turns"] for each in seen] == [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2), (3, 2), (3, 2)]
    assert seen[1]["calls"] == ["add"]
    assert seen[2]["tool_rewards"] == [0.5]
    assert seen[2]["roles"] == ["user", "assistant", "tool"]
    assert [each["turn_scores"] for each in seen[4:]] == [[0.0], [0.0], [0.0, 1.0]]
    assert seen[-1]["mask"] == output.response_mask.sum()
    assert output.extra_fields["turn_scores"] == list(output.turn_scores) == [0.0, 1.0]
    assert output.extra_fields["tool_rewards"] == list(output.tool_rewards) == [0.5]


def test_the_prompt_can_be_changed_before_it_is_rendered() -> None:
    @register("briefed")
    class Briefed(ToolAgentLoop):
        async def _handle_pending_state(self, data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
            data.messages.insert(0, {"role": "system", "content": "Be brief."})
            return await super()._handle_pending_state(data, sampling_params)

    row = {"raw_prompt": user("What is 1 + 2?")}
    output = WorkerHarness([text_reply("3")], agent="briefed").run_one(**row).output
    assert "Be brief." in hermes_template().decode(output.prompt_ids)
    assert row["raw_prompt"] == user("What is 1 + 2?")


def test_a_single_handler_can_be_overridden() -> None:
    @register("refuses_tools")
    class RefusesTools(ToolAgentLoop):
        async def _handle_processing_tools_state(self, data: AgentData) -> AgentState:
            was_added = await data.episode.observe([{"role": "tool", "content": "No tools today."}])
            return AgentState.GENERATING if was_added else AgentState.TERMINATED

    tool = Adder()
    output = WorkerHarness([ADD, ANSWER], tools=[tool], agent="refuses_tools").run_one().output
    assert output.answer == "It is 3."
    assert tool.executed == []


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
        async def _handle_pending_state(self, data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
            await super()._handle_pending_state(data, sampling_params)
            return returned

    assert complaint in error_of(WorkerHarness([text_reply("3")], tools=[Adder()], agent="lost").run_one())


LOOPS = """
from agent_loop import AgentLoopBase, register

@register("from_a_file")
class FromAFile(AgentLoopBase):
    async def run(self, sampling_params, **row):
        raise NotImplementedError
"""


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the loops that a test registered when the test ends."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


@pytest.fixture
def loops_file(tmp_path: Path) -> Path:
    file = tmp_path / "loops.py"
    file.write_text(LOOPS, encoding="utf-8")
    return file


def test_importing_a_file_registers_its_loops(loops_file: Path) -> None:
    assert LoopRegistry(loop_files=[str(loops_file)]).get("from_a_file").loop_class.__name__ == "FromAFile"


def test_a_yaml_file_names_loops_and_their_constructor_arguments(loops_file: Path, tmp_path: Path) -> None:
    config = tmp_path / "loops.yaml"
    config.write_text(f"- {{name: patient, _target_: '{loops_file}:FromAFile', tries: 5}}\n")
    entry = LoopRegistry(config_path=str(config)).get("patient")
    assert entry.loop_class.__name__ == "FromAFile"
    assert entry.kwargs == {"tries": 5}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("name: x", "must hold a list"),
        ("- {name: x}", "needs the keys name and _target_"),
        ("- {name: x, _target_: 'os.path:join'}", "AgentLoopBase"),
        ("- [", "not valid YAML"),
    ],
)
def test_an_invalid_yaml_file_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "loops.yaml").write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        LoopRegistry(config_path=str(tmp_path / "loops.yaml"))


def test_an_unknown_loop_is_named_with_the_nearest() -> None:
    with pytest.raises(DataError, match="did you mean 'tool_agent'"):
        LoopRegistry().get("tool_agnt")


@pytest.mark.parametrize("name", ["tool_agent", "agent_program"])
def test_registering_a_name_of_the_package_again_replaces_its_loop_with_a_warning(name: str) -> None:
    message = rf"agent loop {name!r} was agent_loop\.\w+.*; .*Other replaces it"
    with pytest.warns(UserWarning, match=message) as warned:

        @register(name)
        class Other(SingleTurnAgentLoop):
            pass

    assert LoopRegistry().get(name).loop_class is Other
    assert warned[0].filename == __file__

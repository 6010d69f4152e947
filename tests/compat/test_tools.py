"""Tools in the forms that verl's base class allows, the tool of GSM8K, and rows that configure them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml

from agent_loop.config import RolloutConfig
from agent_loop.errors import DataError
from agent_loop.integrations.verl import (
    BaseTool,
    OpenAIFunctionParametersSchema,
    OpenAIFunctionPropertySchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    ToolResponse,
)
from agent_loop.integrations.verl.gsm8k import NO_PROGRESS_PENALTY
from agent_loop.rewards.function import RewardFunction
from agent_loop.rollout.rows import prepare_rows
from agent_loop.servers.scripted import ScriptedServer
from agent_loop.tools.base import BaseTool as ToolHere
from agent_loop.tools.registry import load_tools
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason
from tests.compat.harness import row, run
from tests.helpers import text_reply, tool_call_reply
from tests.rollout.harness import WorkerHarness

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}


class NamedTool(BaseTool):
    """Tool that sets its name."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema) -> None:
        self.name = tool_schema.function.name
        super().__init__(config, tool_schema)
        self.name = tool_schema.function.name

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return ToolResponse(text=f"{self.name}: {parameters['word']}"), 0.5, {}


class SchemaByMethodTool(BaseTool):
    """Tool whose schema comes from its method and is built with verl's models."""

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        word = OpenAIFunctionPropertySchema(type="string", description="The word.", enum=None)
        parameters = OpenAIFunctionParametersSchema(
            type="object", properties={"word": word}, required=["word"]
        )
        function = OpenAIFunctionSchema(
            name="look_up", description="Looks a word up.", parameters=parameters, strict=None
        )
        return OpenAIFunctionToolSchema(type="function", function=function)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return {"word": parameters["word"], "known": True}


class SilentTool(BaseTool):
    """Tool without `execute` that stores the arguments of `create`."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema) -> None:
        super().__init__(config, tool_schema)
        self.created: dict[str, Any] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        self.created[instance_id] = kwargs.get("create_kwargs", {}).get("color")
        return instance_id, ToolResponse()


Register = Callable[..., Path]


@pytest.fixture
def register_tool(tmp_path: Path) -> Register:
    """Return a function that writes a registry file with a tool."""

    def write(name: str, schema: Mapping[str, Any] | None = SCHEMA) -> Path:
        class_name = name if "." in name else f"{__name__}.{name}"
        entry: dict[str, Any] = {"class_name": class_name, "config": {"type": "native"}}
        if schema is not None:
            entry["tool_schema"] = dict(schema)
        path = tmp_path / "tools.yaml"
        path.write_text(yaml.safe_dump({"tools": [entry]}))
        return path

    return write


def call_twice(path: Path, **row: Any) -> tuple[Trajectory, ToolHere]:
    """Run a trajectory whose model calls the tool twice and then answers."""
    tools = load_tools([], config_path=path)
    calls = [tool_call_reply("look_up", word=word) for word in ("day", "night")]
    trajectory = WorkerHarness([*calls, text_reply("done")], tools=list(tools.values())).run_one(**row)
    assert trajectory.output.failure is None
    return trajectory, tools["look_up"]


def replies(trajectory: Trajectory) -> list[str]:
    return [message["content"] for message in trajectory.output.messages if message["role"] == "tool"]


def test_a_tool_may_set_its_name(register_tool: Register) -> None:
    trajectory, _ = call_twice(register_tool("NamedTool"))
    assert replies(trajectory) == ["look_up: day", "look_up: night"]
    assert trajectory.output.tool_rewards == (0.5, 0.5)


def test_a_tool_may_return_its_schema_from_a_method_and_its_result_as_a_dict(register_tool: Register) -> None:
    trajectory, tool = call_twice(register_tool("SchemaByMethodTool", None))
    assert replies(trajectory) == [f'{{"word": "{word}", "known": true}}' for word in ("day", "night")]
    assert json.loads(json.dumps(tool.tool_schema)) == SCHEMA


def test_a_tool_without_execute_returns_the_default_result_and_reads_nested_create_kwargs(
    register_tool: Register,
) -> None:
    create = {"look_up": {"create_kwargs": {"color": "red"}}}
    trajectory, tool = call_twice(register_tool("SilentTool"), tools_kwargs=create)
    assert replies(trajectory) == ["Updated the tool state."] * 2
    assert trajectory.output.tool_rewards == (0.0, 0.0)
    assert isinstance(tool, SilentTool)
    assert list(tool.created.values()) == ["red"]


def test_nested_fields_of_a_schema_are_attributes() -> None:
    schema = OpenAIFunctionToolSchema.model_validate(SCHEMA)
    assert schema.function.parameters.properties["word"].description == "The word."
    assert schema.model_dump(exclude_unset=True) == SCHEMA
    assert type(schema.model_dump()["function"]) is dict


VERL_REGISTRY = """
tools:
  - class_name: "verl.tools.gsm8k_tool.Gsm8kTool"
    config:
      type: native
    tool_schema:
      type: "function"
      function:
        name: "calc_gsm8k_reward"
        description: "A tool for calculating the reward of gsm8k. (1.0 if parsed answer is correct, 0.0 if not)"
        parameters:
          type: "object"
          properties:
            answer:
              type: "string"
              description: "The model's answer to the GSM8K math problem, must be a digits"
          required: ["answer"]
"""


def gsm8k_harness(folder: Path, *answers: str) -> WorkerHarness:
    (folder / "tools.yaml").write_text(VERL_REGISTRY)
    tools = list(load_tools([], config_path=folder / "tools.yaml").values())
    calls = [tool_call_reply("calc_gsm8k_reward", answer=answer) for answer in answers]
    reward = RewardFunction(lambda output, row: -1.0, timeout_s=1)
    return WorkerHarness([*calls, text_reply("so it is")], tools=tools, reward=reward)


def answers(*given: str, ground_truth: Any, tmp_path: Path) -> Trajectory:
    create = {"create_kwargs": {"ground_truth": ground_truth}}
    return gsm8k_harness(tmp_path, *given).run_one(tools_kwargs={"calc_gsm8k_reward": create})


def test_a_registry_file_of_verl_scores_a_trajectory(tmp_path: Path) -> None:
    trajectory = answers("41", "#### 42", ground_truth="42", tmp_path=tmp_path)
    assert trajectory.output.tool_rewards == (NO_PROGRESS_PENALTY, 0.0)
    assert trajectory.reward == 1.0
    first, second = replies(trajectory)
    assert first == "Current parsed answer='41' reward=0.0"
    assert second == "Current parsed answer='#### 42' reward=1.0"
    assert [f.extra for f in trajectory.output.feedback] == [{"is_correct": False}, {"is_correct": True}]


def test_a_second_right_answer_earns_a_penalty_and_the_last_answer_counts(tmp_path: Path) -> None:
    trajectory = answers("42", "42", "7", ground_truth="42", tmp_path=tmp_path)
    assert trajectory.output.tool_rewards == (0.0, NO_PROGRESS_PENALTY, NO_PROGRESS_PENALTY)
    assert trajectory.reward == 0.0


def test_a_row_without_a_number_fails_with_the_reason(tmp_path: Path) -> None:
    trajectory = answers("42", ground_truth=None, tmp_path=tmp_path)
    assert trajectory.output.stop_reason is StopReason.FAILED
    assert trajectory.output.failure is not None
    assert "ground_truth is None; give the right number" in trajectory.output.failure.error


def test_without_a_ground_truth_the_tool_scores_nothing_and_the_reward_function_is_called(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = gsm8k_harness(tmp_path, "42").run([row(), row()])
    assert first.output.failure is None
    assert first.output.messages[2]["content"] == "Current parsed answer='42' reward=0.0"
    assert first.output.tool_rewards == ()
    assert (first.reward, second.reward) == (-1.0, -1.0)
    warnings = [record for record in caplog.records if "without a ground truth" in record.getMessage()]
    assert len(warnings) == 1


INTERACTIONS = "tests/compat/interactions.yaml"


def record(**interaction_kwargs: Any) -> dict[str, Any]:
    """Return a row of a GSM8K file. Everything but the prompt is in `extra_info`."""
    return {
        "data_source": "openai/gsm8k",
        "agent_name": "tool_agent",
        "prompt": [{"role": "user", "content": "What is 6 * 7?"}],
        "reward_model": {"style": "rule", "ground_truth": "42"},
        "extra_info": {
            "need_tools_kwargs": True,
            "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "42"}}},
            "interaction_kwargs": interaction_kwargs,
        },
    }


CALLS = [tool_call_reply("calc_gsm8k_reward", answer="42"), text_reply("#### 42")]


def run_records(
    *records: dict[str, Any], interactions: str | None = None, **options: Any
) -> list[Trajectory]:
    multi_turn = {"tools": ["gsm8k"], "interaction_config_path": interactions}
    config = RolloutConfig.model_validate({"multi_turn": multi_turn})
    return run(config, prepare_rows(records, prompt_key="prompt"), *CALLS, **options)


def test_interaction_arguments_need_a_name_only_if_an_interaction_is_configured() -> None:
    unnamed = record(query="What is 6 * 7?", ground_truth="42")
    [trajectory] = run_records(unnamed)
    assert (trajectory.output.failure, trajectory.output.stop_reason) == (None, StopReason.ANSWERED)
    assert trajectory.reward == 1.0

    server = ScriptedServer(CALLS)
    with pytest.raises(DataError, match=r"row 1: interaction_kwargs has no name, and .* 'patient'"):
        named = record(name="patient", ground_truth="42")
        run_records(named, unnamed, interactions=INTERACTIONS, servers=[server])
    assert server.requests == []
    with pytest.raises(DataError, match=r"row 0: interaction_kwargs\.name is 'gsm8k', but no interaction is"):
        run_records(record(name="gsm8k", ground_truth="42"))

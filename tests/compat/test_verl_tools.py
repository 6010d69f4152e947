"""Tools in the forms that verl's base class allows, in the shipped tool loop and in a custom loop."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from agent_loop.integrations.verl import (
    AgentLoopBase,
    AgentLoopOutput,
    BaseTool,
    OpenAIFunctionParametersSchema,
    OpenAIFunctionPropertySchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    ToolParser,
    ToolResponse,
    initialize_tools_from_config,
    register,
)
from agent_loop.servers.scripted import ScriptedReply
from agent_loop.tools.base import BaseTool as ToolHere
from agent_loop.tools.registry import load_tools
from agent_loop.trajectory import Trajectory
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


class OwnIdTool(SilentTool):
    """Tool that returns its own instance ids."""

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        return await super().create("own-id", **kwargs)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return ToolResponse(text=f"{instance_id} is {self.created[instance_id]}"), 0.0, {}


def registry_file(folder: Path, name: str, schema: Mapping[str, Any] | None = SCHEMA) -> Path:
    class_name = name if "." in name else f"tests.compat.test_verl_tools.{name}"
    entry: dict[str, Any] = {"class_name": class_name, "config": {"type": "native"}}
    if schema is not None:
        entry["tool_schema"] = dict(schema)
    path = folder / "tools.yaml"
    path.write_text(yaml.safe_dump({"tools": [entry]}))
    return path


def run(path: Path, **row: Any) -> tuple[Trajectory, ToolHere]:
    """Run a trajectory whose model calls the tool twice and then answers."""
    tools = load_tools([], config_path=path)
    turns: list[ScriptedReply] = [
        tool_call_reply("look_up", word="day"),
        tool_call_reply("look_up", word="night"),
        text_reply("done"),
    ]
    trajectory = WorkerHarness(turns, tools=list(tools.values())).run_one(**row)
    assert trajectory.output.failure is None
    return trajectory, tools["look_up"]


def replies(trajectory: Trajectory) -> list[str]:
    return [message["content"] for message in trajectory.output.messages if message["role"] == "tool"]


def test_a_tool_may_set_its_name(tmp_path: Path) -> None:
    trajectory, _ = run(registry_file(tmp_path, "NamedTool"))
    assert replies(trajectory) == ["look_up: day", "look_up: night"]
    assert trajectory.output.tool_rewards == (0.5, 0.5)


def test_a_tool_may_return_its_schema_from_a_method_and_its_result_as_a_dict(tmp_path: Path) -> None:
    trajectory, tool = run(registry_file(tmp_path, "SchemaByMethodTool", None))
    assert replies(trajectory) == [
        '{"word": "day", "known": true}',
        '{"word": "night", "known": true}',
    ]
    assert json.loads(json.dumps(tool.tool_schema)) == SCHEMA


def test_a_tool_without_execute_returns_the_default_result_and_reads_nested_create_kwargs(
    tmp_path: Path,
) -> None:
    create = {"look_up": {"create_kwargs": {"color": "red"}}}
    trajectory, tool = run(registry_file(tmp_path, "SilentTool"), tools_kwargs=create)
    assert replies(trajectory) == ["Updated the tool state."] * 2
    assert trajectory.output.tool_rewards == (0.0, 0.0)
    assert isinstance(tool, SilentTool)
    assert list(tool.created.values()) == ["red"]


def test_nested_fields_of_a_schema_are_attributes() -> None:
    schema = OpenAIFunctionToolSchema.model_validate(SCHEMA)
    assert schema.function.parameters.properties["word"].description == "The word."
    assert schema.model_dump(exclude_unset=True) == SCHEMA
    assert type(schema.model_dump()["function"]) is dict


@register("two_calls")
class TwoCalls(AgentLoopBase):
    """Custom loop that creates and releases a tool around each call, in verl's older and newer form."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        [tool] = initialize_tools_from_config(row["tool_file"])
        parser = ToolParser.get_tool_parser("hermes", self.tokenizer)
        messages = list(row["raw_prompt"])
        prompt_ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        response_ids: list[int] = []
        texts: list[str] = []
        for number in range(2):
            sampled = await self.server_manager.generate(
                request_id="r", prompt_ids=prompt_ids + response_ids, sampling_params=sampling_params
            )
            response_ids += sampled
            _, [call] = await parser.extract_tool_calls(sampled)
            if number == 0:
                instance_id = await tool.create()
            else:
                instance_id, _ = await tool.create(create_kwargs=row["create_kwargs"])
            response, _, _ = await tool.execute(instance_id, json.loads(call.arguments), agent_data=None)
            texts.append(str(response))
            await tool.release(instance_id)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            response_mask=[1] * len(response_ids),
            num_turns=4,
            metrics={},
            extra_fields={"texts": texts},
        )


def two_calls(path: Path, name: str, create_kwargs: dict[str, Any], **arguments: Any) -> list[str]:
    script = [tool_call_reply(name, **arguments), tool_call_reply(name, **arguments)]
    trajectory = WorkerHarness(script, agent="two_calls").run_one(
        tool_file=str(path), create_kwargs=create_kwargs
    )
    assert trajectory.output.failure is None
    return trajectory.output.extra_fields["texts"]


def test_the_shipped_gsm8k_tool_is_created_without_a_ground_truth(tmp_path: Path) -> None:
    function = {"name": "calc_gsm8k_reward", "parameters": {"properties": {"answer": {"type": "string"}}}}
    schema = {"type": "function", "function": function}
    path = registry_file(tmp_path, "verl.tools.gsm8k_tool.Gsm8kTool", schema)
    texts = two_calls(path, "calc_gsm8k_reward", {"ground_truth": "42"}, answer="42")
    assert texts == ["Current parsed answer='42' reward=0.0", "Current parsed answer='42' reward=1.0"]


def test_a_loop_gets_the_id_that_the_tool_returned(tmp_path: Path) -> None:
    texts = two_calls(registry_file(tmp_path, "OwnIdTool"), "look_up", {"color": "blue"}, word="day")
    assert texts == ["own-id is None", "own-id is blue"]

"""Loading of tools from references and YAML files, and their selection by rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_loop.config import RolloutConfig
from agent_loop.errors import ConfigError, DataError
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.servers.scripted import ScriptedServer
from agent_loop.tools.registry import load_tools, with_row_columns
from agent_loop.trajectory import IncidentKind
from tests.helpers import hermes_template, text_reply, tool_call_reply, user
from tests.rollout.harness import Adder, WorkerHarness

TOOLS = '''
from agent_loop.tools.base import BaseTool, ToolResponse
from agent_loop.tools.function import function_tool
from tests.tools.harness import tool_schema


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


class Echo(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=self.config.get("text")), None, {}


class SelfDescribed(Echo):
    tool_schema = tool_schema("described")


class Broken(Echo):
    def __init__(self, config, tool_schema):
        raise ValueError("no licence")


class NoTool:
    pass


def make(config):
    return [Echo({}, tool_schema(name)) for name in config["names"]]


number = 3
'''
SCHEMA = "{type: function, function: {name: echo, parameters: {type: object, properties: {}}}}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tools.py").write_text(TOOLS)
    return tmp_path


def load(folder: Path, text: str) -> dict[str, Any]:
    """Load the tools of a YAML file, which names the file of tools FILE."""
    path = folder / "tools.yaml"
    path.write_text(text.replace("FILE", f"{folder}/tools.py"))
    return load_tools([], config_path=path)


def test_references_load_function_tools_and_classes_with_a_schema(folder: Path) -> None:
    tools = load_tools([f"{folder}/tools.py:multiply", f"{folder}/tools.py:SelfDescribed"])
    assert list(tools) == ["multiply", "described"]


def test_the_yaml_file_creates_each_class_with_its_config_and_schema(folder: Path) -> None:
    text = f"""
        tools:
          - class_name: FILE:Echo
            config: {{type: native, text: hello}}
            tool_schema: {SCHEMA}
          - class_name: FILE:SelfDescribed
          - {{class_name: 'FILE:make', config: {{names: [a, b]}}, timeout_s: 3}}
        """
    tools = load(folder, text)
    assert list(tools) == ["echo", "described", "a", "b"]
    assert tools["echo"].config == {"type": "native", "text": "hello"}
    assert [tools[name].timeout_s for name in tools] == [None, None, 3.0, 3.0]


def test_an_entry_overrides_the_limits_of_a_tool(tmp_path: Path) -> None:
    entry = "tools: [{class_name: calculator, timeout_s: 5, max_concurrent: 8, retries: 1}]"
    tool = load(tmp_path, entry)["calculator"]
    assert (tool.timeout_s, tool.max_concurrent, tool.retries) == (5.0, 8, 1)
    with pytest.raises(ConfigError, match="has retries=1 but on_replay='once'"):
        load(tmp_path, entry.replace("retries: 1", "retries: 1, on_replay: once"))


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("NoTool", "not a subclass of BaseTool"),
        ("number", "an object of type int; name a function decorated"),
        ("multipy", "has no 'multipy'; did you mean 'multiply'"),
        ("Echo", "Echo has no schema; give tool_schema in the YAML, or a class attribute"),
    ],
)
def test_a_reference_to_no_tool_is_refused(folder: Path, reference: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_tools([f"{folder}/tools.py:{reference}"])


def test_two_tools_with_the_same_name_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="are both named 'multiply'; rename one"):
        load_tools([f"{folder}/tools.py:multiply"] * 2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tools: [", "not valid YAML"),
        ("tool: []", "no list under 'tools'"),
        ("- 1", "no list under 'tools'"),
        ("tools: []\nmore: 1", "unknown key 'more'"),
        ("tools: [3]", r"tools\[0\] is 3; give keys: class_name, config, tool_schema"),
        ("tools: [{class_nam: x}]", "unknown key 'class_nam'; did you mean 'class_name'"),
        ("tools: [{class_name: 'no.such.Tool'}]", "importing no.such raised ModuleNotFoundError"),
        ("tools: [{class_name: 'FILE:NoTool'}]", "not a subclass of BaseTool"),
        ("tools: [{class_name: 'FILE:multiply', config: {a: 1}}]", "is an instance, which takes no config"),
        ("tools: [{class_name: 'FILE:Echo'}]", "has no schema"),
        (
            "tools: [{class_name: 'FILE:Echo', tool_schema: {function: {name: e, parameters: {type: 3}}}}]",
            "not a valid JSON schema",
        ),
        (
            f"tools: [{{class_name: 'FILE:Broken', tool_schema: {SCHEMA}}}]",
            "constructing Broken raised ValueError: no licence",
        ),
        ("tools: [{class_name: 'FILE:make', config: {names: []}}]", "return a list of BaseTool objects"),
    ],
)
def test_an_invalid_file_is_refused_with_the_reason(folder: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(folder, text)


def test_a_row_sees_and_calls_only_its_selected_tools() -> None:
    chosen, other = Adder(name="chosen"), Adder(name="other")
    script = [tool_call_reply("other", a=1, b=2), tool_call_reply("chosen", a=1, b=2), text_reply("3")]
    row = {
        "tool_selection": ["chosen"],
        "tools_kwargs": {"other": {"create_kwargs": {"x": 1}}, "chosen": None},
    }
    output = WorkerHarness(script, tools=[other, chosen]).run_one(**row).output
    assert [schema["function"]["name"] for schema in output.tool_schemas] == ["chosen"]
    assert [incident.kind for incident in output.incidents] == [IncidentKind.UNKNOWN_TOOL]
    assert (other.num_created, chosen.num_created) == (0, 1)
    assert [m["content"] for m in output.messages if m["role"] == "tool"] == [
        "there is no tool 'other'; there are: chosen",
        "3",
    ]


@pytest.mark.parametrize(("selection", "num_tools"), [(None, 2), ([], 0), (("b", "a"), 2)])
def test_none_selects_all_tools_and_an_empty_list_selects_none(selection: Any, num_tools: int) -> None:
    harness = WorkerHarness([text_reply("hello")], tools=[Adder(name="a"), Adder(name="b")])
    output = harness.run_one(tool_selection=selection).output
    assert len(output.tool_schemas) == num_tools


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("tool_selection", ["calculater"], "row 1: tool_selection: there is no tool .*; did you mean"),
        ("tool_selection", "calculator", "give a list of tool names"),
        ("tool_selection", [3], "give a list of tool names"),
        ("tool_selection", ["calculator", "calculator"], "list each tool once"),
        ("tools_kwargs", {"calculater": {}}, "row 1: tools_kwargs: there is no 'calculater'"),
    ],
)
async def test_an_unknown_tool_in_a_row_is_an_error_before_any_work(
    column: str, value: Any, message: str
) -> None:
    server = ScriptedServer([text_reply("hello")])
    config = RolloutConfig.model_validate({"multi_turn": {"tools": ["calculator"]}})
    async with AgentLoopManager(config, servers=[server], template=hermes_template()) as manager:
        rows = [{"raw_prompt": user("?")}, {"raw_prompt": user("?"), column: value}]
        with pytest.raises(DataError, match=message):
            await manager.run(rows, n=1)
    assert server.num_sessions == 0


def test_a_tool_gets_the_columns_that_it_asks_for() -> None:
    tool, other = Adder(name="tool"), Adder(name="other")
    tool.row_columns = ["place", "absent"]
    given = {"tool": {"create_kwargs": {"a": 1}}, "other": {"create_kwargs": {"b": 2}}}
    tools = {"tool": tool, "other": other}
    assert with_row_columns(given, tools=tools, row={"place": "x", "more": 1, "absent": None}) == {
        "tool": {"create_kwargs": {"a": 1, "place": "x"}},
        "other": {"create_kwargs": {"b": 2}},
    }
    own = {"tool": {"create_kwargs": {"place": "own"}}}
    assert with_row_columns(own, tools=tools, row={"place": "x"}) == own

from pathlib import Path

import pytest

from agent_loop.errors import ConfigError
from agent_loop.tools.registry import load_tools

TOOLS = '''
from agent_loop.tools.base import BaseTool, ToolResponse
from agent_loop.tools.function import function_tool


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


def plain(a: int) -> int:
    """Do it."""
    return a


class Echo(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=self.config.get("text")), None, {}


class SelfDescribed(Echo):
    tool_schema = {"type": "function", "function": {"name": "described", "parameters": {"type": "object"}}}


class Broken(Echo):
    def __init__(self, config, tool_schema):
        raise ValueError("no licence")


class NoTool:
    pass


number = 3
'''
SCHEMA = "{type: function, function: {name: echo, parameters: {type: object, properties: {}}}}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tools.py").write_text(TOOLS)
    return tmp_path


def yaml_of(folder: Path, text: str) -> Path:
    path = folder / "tools.yaml"
    path.write_text(text.replace("FOLDER", str(folder)))
    return path


def test_references_load_function_tools_and_classes_with_a_schema(folder: Path) -> None:
    tools = load_tools([f"{folder}/tools.py:multiply", f"{folder}/tools.py:SelfDescribed"])
    assert list(tools) == ["multiply", "described"]


def test_the_yaml_file_creates_each_class_with_its_config_and_schema(folder: Path) -> None:
    path = yaml_of(
        folder,
        f"""
        tools:
          - class_name: FOLDER/tools.py:Echo
            config: {{type: native, text: hello}}
            tool_schema: {SCHEMA}
          - class_name: FOLDER/tools.py:SelfDescribed
        """,
    )
    tools = load_tools([], config_path=path)
    assert list(tools) == ["echo", "described"]
    assert tools["echo"].config == {"type": "native", "text": "hello"}


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("NoTool", "not a subclass of BaseTool"),
        ("number", "an object of type int; name a function decorated"),
        ("multipy", "has no 'multipy'; did you mean 'multiply'"),
        ("Echo", "Echo has no schema; give tool_schema in the YAML, or a class attribute"),
    ],
)
def test_a_reference_to_something_other_than_a_tool_is_refused(
    folder: Path, reference: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        load_tools([f"{folder}/tools.py:{reference}"])


def test_two_tools_with_the_same_name_are_refused(folder: Path) -> None:
    reference = f"{folder}/tools.py:multiply"
    with pytest.raises(ConfigError, match="are both named 'multiply'; rename one"):
        load_tools([reference, reference])


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
        ("tools: [{class_name: 'FOLDER/other.py:Tool'}]", "other.py' does not exist"),
        ("tools: [{class_name: 'FOLDER/tools.py:Eco'}]", "did you mean 'Echo'"),
        ("tools: [{class_name: 'FOLDER/tools.py:NoTool'}]", "not a subclass of BaseTool"),
        (
            "tools: [{class_name: 'FOLDER/tools.py:multiply', config: {a: 1}}]",
            "is an instance, which takes no config",
        ),
        ("tools: [{class_name: 'FOLDER/tools.py:Echo'}]", "has no schema"),
        (
            "tools: [{class_name: 'FOLDER/tools.py:Echo', tool_schema: {function: {name: e, parameters: {type: 3}}}}]",
            "not a valid JSON schema",
        ),
        (
            f"tools: [{{class_name: 'FOLDER/tools.py:Broken', tool_schema: {SCHEMA}}}]",
            "constructing Broken raised ValueError: no licence",
        ),
    ],
)
def test_an_invalid_file_is_refused_with_the_reason(folder: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_tools([], config_path=yaml_of(folder, text))

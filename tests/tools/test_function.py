"""Tools made of functions: their schemas, arguments and results."""

import asyncio
import dataclasses
import enum
import threading
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from agent_loop.errors import ConfigError, ToolError
from agent_loop.tools.function import FunctionTool, function_tool
from agent_loop.tools.signature import function_schema


@function_tool
def multiply(a: int, b: int = 1) -> int:
    """Multiply two integers.

    Large ones too.

    Args:
        a: First factor, which goes on
            in a second line.
        b (int): Second factor: any.

    Returns:
        The product.
    """
    return a * b


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Point:
    x: float
    title: str = "origin"


class Celsius:
    def __str__(self) -> str:
        return "21 degrees"


def text_of(tool: FunctionTool[Any, Any], **arguments: Any) -> str | None:
    response, reward, extra = asyncio.run(tool.execute("one", arguments))
    assert (reward, extra) == (None, {})
    return response.text


def properties_of(function: Any) -> dict[str, Any]:
    return function_schema(function)["function"]["parameters"]["properties"]


def test_a_decorated_function_is_a_tool_and_still_a_function() -> None:
    assert multiply(2, b=4) == 8
    assert multiply.__doc__ is not None
    assert multiply.__doc__.startswith("Multiply")
    assert text_of(multiply, a=2) == "2"
    assert multiply.name == "multiply"
    assert multiply.tool_schema == {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply two integers.\n\nLarge ones too.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "First factor, which goes on in a second line."},
                    "b": {"type": "integer", "description": "Second factor: any.", "default": 1},
                },
                "required": ["a"],
            },
        },
    }


def test_name_and_description_can_be_overridden() -> None:
    @function_tool(name="times", description="Multiplies.")
    def product(a: int) -> int:
        return a

    assert product.name == "times"
    assert product.tool_schema["function"]["description"] == "Multiplies."


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        (None, ""),
        (2.5, "2.5"),
        (True, "true"),
        ({"city": "Zürich"}, '{"city": "Zürich"}'),
        ([Color.RED, Point(1.0)], '["red", {"x": 1.0, "title": "origin"}]'),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        (Celsius(), "21 degrees"),
    ],
)
def test_what_the_function_returns_becomes_text(value: Any, text: str) -> None:
    @function_tool
    def tool() -> Any:
        """Do it."""
        return value

    assert text_of(tool) == text


def test_a_sync_function_runs_in_a_thread_and_an_async_one_on_the_loop() -> None:
    @function_tool
    def in_thread() -> bool:
        """Tells where it runs."""
        return threading.current_thread() is threading.main_thread()

    @function_tool
    async def on_loop() -> bool:
        """Tells where it runs."""
        return threading.current_thread() is threading.main_thread()

    assert text_of(in_thread) == "false"
    assert text_of(on_loop) == "true"


def test_arguments_are_converted_to_the_annotated_types() -> None:
    seen: list[Any] = []

    @function_tool
    def tool(color: Color, points: list[Point], pair: tuple[int, int] = (0, 0)) -> None:
        """Do it."""
        seen.extend([color, points, pair])

    text_of(tool, color="red", points=[{"x": 1}])
    assert seen == [Color.RED, [Point(1.0)], (0, 0)]


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (str, {"type": "string"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (None, {"type": "null"}),
        (Any, {}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Color, {"type": "string", "enum": ["red", "blue"]}),
        (int | None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        (
            Annotated[int, Field(ge=1, description="A count.")],
            {"type": "integer", "minimum": 1, "description": "A count."},
        ),
        (
            tuple[int, str],
            {
                "type": "array",
                "prefixItems": [{"type": "integer"}, {"type": "string"}],
                "minItems": 2,
                "maxItems": 2,
            },
        ),
    ],
)
def test_annotations_become_json_schema(annotation: Any, expected: dict[str, Any]) -> None:
    def tool(value):  # pyright: ignore
        """Do it."""

    tool.__annotations__ = {"value": annotation}
    assert properties_of(tool)["value"] == expected


class Route(BaseModel):
    """Where to go."""

    points: list[Point]
    next: list["Route"] = []


class Corner(TypedDict, total=False):
    x: int


def test_models_are_inlined_without_references_also_those_that_contain_themselves() -> None:
    @function_tool
    def go(route: Route, at: list[Corner] | None = None) -> str:
        """Goes."""
        return f"{route.next[0].next[0].points[0].title} at {at}"

    properties = go.tool_schema["function"]["parameters"]["properties"]
    point = {
        "type": "object",
        "properties": {"x": {"type": "number"}, "title": {"type": "string", "default": "origin"}},
        "required": ["x"],
    }
    assert "$ref" not in str(properties)
    assert properties["route"]["description"] == "Where to go."
    assert properties["route"]["required"] == ["points"]
    assert properties["route"]["properties"]["points"] == {"type": "array", "items": point}
    assert properties["route"]["properties"]["next"]["items"] == {
        "type": "object",
        "description": "Where to go.",
    }
    assert properties["at"]["anyOf"][0]["items"]["properties"] == {"x": {"type": "integer"}}
    last = {"points": [{"x": 1, "title": "c"}]}
    route = {"points": [], "next": [{"points": [], "next": [last]}]}
    assert text_of(go, route=route, at=[{"x": 1}]) == "c at [{'x': 1}]"
    with pytest.raises(ToolError, match=r"next\.0\.points"):
        text_of(go, route={"points": [], "next": [{"title": "b"}]})


def test_a_parameter_may_be_named_like_a_method_of_pydantic() -> None:
    def tool(copy: int, model_config: str, _hidden: int = 0) -> None:
        """Do it."""

    assert list(properties_of(tool)) == ["copy", "model_config", "_hidden"]


WRONG_DOCSTRING = """Do it.

    Args:
        frist: The first.
"""


@pytest.mark.parametrize(
    ("parameters", "docstring", "says"),
    [
        ("a: int", "", "tool has no docstring; describe what it does"),
        ("a", "Do it.", "parameter 'a' has no annotation; give its type, as in a: int"),
        ("*values: int", "Do it.", r"takes \*values: int, but arguments are passed by name"),
        ("**values: int", "Do it.", r"takes \*\*values: int, but arguments are passed by name"),
        ("a: int, /", "Do it.", "takes a: int, but arguments are passed by name"),
        ("first: int", WRONG_DOCSTRING, "describes 'frist', which is not a parameter; did you mean 'first'"),
        ("a: type", "Do it.", "has no JSON form"),
        ("a: 'Missing'", "Do it.", "annotations cannot be read: name 'Missing' is not defined"),
    ],
)
def test_a_function_that_models_cannot_call_is_refused(parameters: str, docstring: str, says: str) -> None:
    names: dict[str, Any] = {"__name__": "mine"}
    exec(f"def tool({parameters}): ...", names)
    names["tool"].__doc__ = docstring
    with pytest.raises(ConfigError, match=says):
        function_schema(names["tool"])

import asyncio
import dataclasses
import enum
import threading
from typing import Any

import pytest
from pydantic import BaseModel
from typing_extensions import TypedDict

from agent_loop.errors import ToolError
from agent_loop.tools.function import FunctionTool, function_tool


@function_tool
def multiply(a: int, b: int = 3) -> int:
    """Multiply two integers.

    Args:
        a: First factor.
        b: Second factor.
    """
    return a * b


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: float


class Celsius:
    def __str__(self) -> str:
        return "21 degrees"


def text_of(tool: FunctionTool[Any, Any], **arguments: Any) -> str | None:
    response, reward, extra = asyncio.run(tool.execute("one", arguments))
    assert (reward, extra) == (None, {})
    return response.text


def test_a_decorated_function_is_a_tool_and_still_a_function() -> None:
    assert multiply(2, b=4) == 8
    assert multiply.name == "multiply"
    assert multiply.__doc__ is not None
    assert multiply.__doc__.startswith("Multiply")
    assert text_of(multiply, a=2) == "6"


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
        ([Color.RED, Point(1.0)], '["red", {"x": 1.0}]'),
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


class Node(BaseModel):
    """A node."""

    name: str
    children: list["Node"] = []


class Corner(TypedDict, total=False):
    x: int


def test_types_that_contain_themselves_and_typed_dictionaries_are_shown_without_references() -> None:
    @function_tool
    def draw(tree: Node, at: list[Corner] | None = None) -> str:
        """Draw a tree."""
        return f"{tree.children[0].children[0].name} at {at}"

    properties = draw.tool_schema["function"]["parameters"]["properties"]
    assert "$ref" not in str(draw.tool_schema)
    assert properties["tree"]["properties"]["children"]["items"] == {
        "type": "object",
        "description": "A node.",
    }
    assert properties["at"]["anyOf"][0]["items"]["properties"] == {"x": {"type": "integer"}}
    tree = {"name": "a", "children": [{"name": "b", "children": [{"name": "c"}]}]}
    response, _, _ = asyncio.run(draw.execute("1", {"tree": tree, "at": [{"x": 1}]}))
    assert response.text == "c at [{'x': 1}]"
    tree["children"] = [{"title": "b"}]
    with pytest.raises(ToolError, match=r"children\.0\.name"):
        asyncio.run(draw.execute("1", {"tree": tree}))

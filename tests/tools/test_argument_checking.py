from typing import Any

import pytest

from agent_loop.testing import run_virtual
from agent_loop.tools.base import ArgumentChecking, BaseTool, ToolResponse
from agent_loop.tools.function import function_tool
from agent_loop.tools.results import ToolResult
from agent_loop.tools.schema import coerce_arguments
from agent_loop.tools.session import ToolSession, ToolSessionConfig
from agent_loop.types import ToolCall

PROPERTIES = {
    "count": {"type": "integer"},
    "price": {"type": "number"},
    "name": {"type": "string"},
    "is_open": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "integer"}},
    "place": {"type": "object", "properties": {"row": {"type": "integer"}}},
    "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "level": {"type": ["integer", "string"]},
}
SCHEMA = {"type": "function", "function": {"name": "keep", "parameters": {"properties": PROPERTIES}}}


class Keeper(BaseTool):
    """Tool that keeps the arguments of its calls."""

    def __init__(self, check_arguments: ArgumentChecking | str | None = None) -> None:
        super().__init__({}, SCHEMA)
        self.kept: list[dict[str, Any]] = []
        if check_arguments is not None:
            self.check_arguments = check_arguments

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.kept.append(parameters)
        return ToolResponse(text="kept")


def execute(tool: BaseTool, **arguments: Any) -> ToolResult:
    async def main() -> ToolResult:
        session = ToolSession({tool.name: tool}, config=ToolSessionConfig(timeout_s=60, close_timeout_s=10))
        try:
            return await session.execute(ToolCall(tool.name, arguments))
        finally:
            await session.close()

    return run_virtual(main())


def coerced(name: str, value: Any) -> Any:
    return coerce_arguments(SCHEMA, {name: value})[name]


def is_same(value: Any, expected: Any) -> bool:
    return value == expected and type(value) is type(expected)


def test_coerced_arguments_reach_the_tool_with_the_types_of_the_schema() -> None:
    tool = Keeper("coerce")
    assert execute(tool, count="3", name=7, is_open="True").incident is None
    assert tool.kept == [{"count": 3, "name": "7", "is_open": True}]


def test_arguments_that_cannot_be_coerced_are_reported() -> None:
    tool = Keeper(ArgumentChecking.COERCE)
    result = execute(tool, count="three")
    assert "expected an integer" in str(result.response.text)
    assert tool.kept == []


def test_unchecked_arguments_reach_the_tool_unchanged() -> None:
    tool = Keeper("off")
    assert execute(tool, count="three", unknown=None).incident is None
    assert tool.kept == [{"count": "three", "unknown": None}]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("count", "3", 3),
        ("count", 3.0, 3),
        ("count", "1e3", 1000),
        ("price", "2.5", 2.5),
        ("price", 2, 2),
        ("name", 2.5, "2.5"),
        ("name", True, "true"),
        ("is_open", "False", False),
        ("tags", "[1, 2]", [1, 2]),
        ("tags", ["1", 2.0], [1, 2]),
        ("place", '{"row": "4"}', {"row": 4}),
        ("limit", "null", None),
        ("limit", "8", 8),
        ("level", "8", "8"),
        ("unknown", "8", "8"),
    ],
)
def test_a_value_is_converted_where_it_stays_the_same(name: str, value: Any, expected: Any) -> None:
    assert is_same(coerced(name, value), expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("count", "3.5"),
        ("count", True),
        ("count", None),
        ("count", ""),
        ("price", "NaN"),
        ("price", "1e999"),
        ("name", None),
        ("name", [1]),
        ("is_open", 1),
        ("is_open", "yes"),
        ("tags", "1, 2"),
        ("place", "[" * 100_000),
    ],
)
def test_a_value_that_would_change_is_left_alone(name: str, value: Any) -> None:
    assert is_same(coerced(name, value), value)


def test_a_function_can_have_its_arguments_coerced() -> None:
    @function_tool(check_arguments="coerce")
    def double(amount: int) -> int:
        """Double a number."""
        return 2 * amount

    assert execute(double, amount="4").response.text == "8"

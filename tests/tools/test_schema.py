import dataclasses
import enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from agent_loop.errors import ConfigError
from agent_loop.tools.schema import check_arguments, check_tool_schema
from agent_loop.tools.signature import function_schema


class Unit(enum.Enum):
    METRE = "m"
    FOOT = "ft"


@dataclasses.dataclass
class Point:
    x: int
    title: str = "origin"


class Route(BaseModel):
    """Where to go."""

    points: list[Point]


def parameters_of(function: Any) -> dict[str, Any]:
    return function_schema(function)["function"]["parameters"]


def test_a_schema_is_built_from_type_hints_and_docstring() -> None:
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

    assert function_schema(multiply) == {
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
        (Unit, {"type": "string", "enum": ["m", "ft"]}),
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
    assert parameters_of(tool)["properties"]["value"] == expected


def test_nested_models_are_inlined_and_keep_fields_named_title() -> None:
    def go(route: Route) -> None:
        """Goes."""

    point = {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "title": {"type": "string", "default": "origin"}},
        "required": ["x"],
    }
    assert parameters_of(go)["properties"]["route"] == {
        "type": "object",
        "properties": {"points": {"type": "array", "items": point}},
        "required": ["points"],
        "description": "Where to go.",
    }


def test_a_parameter_may_be_named_like_a_method_of_pydantic() -> None:
    def tool(copy: int, model_config: str, _hidden: int = 0) -> None:
        """Do it."""

    assert list(parameters_of(tool)["properties"]) == ["copy", "model_config", "_hidden"]


def no_docstring(a: int) -> None: ...


def no_annotation(a) -> None:  # type: ignore
    """Do it."""


def any_number(*values: int) -> None:
    """Do it."""


def any_names(**values: int) -> None:
    """Do it."""


def by_position(a: int, /) -> None:
    """Do it."""


def wrong_docstring(first: int) -> None:
    """Do it.

    Args:
        frist: The first.
    """


def no_json_form(a: type) -> None:
    """Do it."""


def unknown_type(a: "Missing") -> None:  # type: ignore # noqa: F821
    """Do it."""


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (no_docstring, "no_docstring has no docstring; describe what it does"),
        (no_annotation, "parameter 'a' has no annotation; give its type, as in a: int"),
        (any_number, r"takes \*values: int, but arguments are passed by name"),
        (any_names, r"takes \*\*values: int, but arguments are passed by name"),
        (by_position, "takes a: int, but arguments are passed by name"),
        (wrong_docstring, "describes 'frist', which is not a parameter; did you mean 'first'"),
        (no_json_form, "has no JSON form"),
        (unknown_type, "annotations cannot be read: name 'Missing' is not defined"),
    ],
)
def test_a_function_that_models_cannot_call_is_refused(function: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        function_schema(function)


SCHEMA = {
    "type": "function",
    "function": {
        "name": "book",
        "parameters": {
            "type": "object",
            "properties": {
                "seats": {"type": "integer", "minimum": 1},
                "class": {"enum": ["first", "second"]},
                "names": {"type": "array", "items": {"type": "string"}},
                "route": {
                    "anyOf": [
                        {"type": "null"},
                        {"type": "object", "properties": {"to": {"type": "string"}}, "required": ["to"]},
                    ]
                },
            },
            "required": ["seats", "class"],
        },
    },
}
FITTING = {"seats": 2, "class": "first"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (FITTING, None),
        (FITTING | {"seats": "2"}, "argument 'seats' is \"2\", a string; expected an integer"),
        (FITTING | {"seats": True}, "argument 'seats' is true, a boolean; expected an integer"),
        (FITTING | {"seats": 0}, "argument 'seats': 0 is less than the minimum of 1"),
        (
            FITTING | {"class": "third"},
            'argument \'class\' is "third", a string; expected one of "first", "second"',
        ),
        (FITTING | {"names": ["A", 3]}, "argument 'names[1]' is 3, an integer; expected a string"),
        (FITTING | {"route": {}}, "argument 'route' lacks 'to'"),
        (FITTING | {"route": 1}, "argument 'route' is 1, an integer; expected null or an object"),
        (FITTING | {"seat": 2}, "the call has no argument 'seat'; did you mean 'seats'?"),
        ({}, "the call lacks 'seats', 'class'"),
        ([1, 2], "the call is [1, 2], an array; expected an object"),
    ],
)
def test_invalid_arguments_are_reported_with_the_expected_and_actual_values(
    arguments: Any, sentence: str | None
) -> None:
    assert check_arguments(SCHEMA, arguments) == sentence


def test_several_errors_are_reported_together() -> None:
    assert check_arguments(SCHEMA, {"seats": "2", "class": 1}) == (
        "argument 'seats' is \"2\", a string; expected an integer; "
        'argument \'class\' is 1, an integer; expected one of "first", "second"'
    )


def test_a_schema_without_properties_accepts_any_arguments() -> None:
    schema = {"type": "function", "function": {"name": "free"}}
    assert check_arguments(schema, {"whatever": 1}) is None


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ({"name": "x", "parameters": {"type": "objekt"}}, "not a valid JSON schema: type: 'objekt'"),
        ({"name": "x", "parameters": {"type": "array"}}, "has the type 'array'; make it 'object'"),
        ({"name": "x", "parameters": {"properties": {"ab": {}}, "required": ["abc"]}}, "did you mean 'ab'"),
        ({"name": "two words"}, "function.name is 'two words'"),
        ({"name": "x", "parametres": {}}, "unknown key 'function.parametres'; did you mean"),
        ({}, "name"),
    ],
)
def test_an_invalid_tool_schema_is_refused(function: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_tool_schema({"type": "function", "function": function}, where="here")


def parameters(**properties: Any) -> dict[str, Any]:
    return {"function": {"name": "t", "parameters": {"type": "object", "properties": properties}}}


def test_a_reference_within_the_schema_is_followed() -> None:
    tool_schema = parameters(x={"$ref": "#/$defs/x"})
    tool_schema["function"]["parameters"]["$defs"] = {"x": {"type": "integer"}}
    check_tool_schema(tool_schema, where="t")
    assert check_arguments(tool_schema, {"x": "1"}) == "argument 'x' is \"1\", a string; expected an integer"

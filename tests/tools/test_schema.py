"""Checks of arguments against schemas, also those of strangers: none blocks, fetches anything, or crashes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from agent_loop.errors import ConfigError
from agent_loop.serve.chat_requests import ChatCompletionRequest
from agent_loop.tools.base import ArgumentChecking, BaseTool, ToolResponse
from agent_loop.tools.function import function_tool
from agent_loop.tools.json_schema import SchemaValidator
from agent_loop.tools.schema import check_arguments, check_tool_schema, coerce_arguments
from tests.tools.harness import execute, kind_of, tool_schema

BOOKING = tool_schema(
    "book",
    "seats",
    "class",
    **{
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
)
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
        (
            {"seats": "2", "class": 1},
            "argument 'seats' is \"2\", a string; expected an integer; "
            'argument \'class\' is 1, an integer; expected one of "first", "second"',
        ),
    ],
)
def test_invalid_arguments_are_reported_with_the_expected_and_actual_values(
    arguments: Any, sentence: str | None
) -> None:
    assert check_arguments(BOOKING, arguments) == sentence


def test_a_schema_without_properties_accepts_any_arguments() -> None:
    assert check_arguments({"type": "function", "function": {"name": "free"}}, {"whatever": 1}) is None


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


KEPT = tool_schema(
    "keep",
    count="integer",
    price="number",
    name="string",
    is_open="boolean",
    tags={"type": "array", "items": {"type": "integer"}},
    place={"type": "object", "properties": {"row": {"type": "integer"}}},
    limit={"anyOf": [{"type": "integer"}, {"type": "null"}]},
    level={"type": ["integer", "string"]},
)


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
    coerced = coerce_arguments(KEPT, {name: value})[name]
    assert coerced == expected
    assert type(coerced) is type(expected)


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
    coerced = coerce_arguments(KEPT, {name: value})[name]
    assert coerced == value
    assert type(coerced) is type(value)


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("checking", "arguments", "kept"),
    [
        ("coerce", {"count": "3", "name": 7}, {"count": 3, "name": "7"}),
        (ArgumentChecking.COERCE, {"count": "three"}, None),
        (None, {"count": "3"}, None),
        ("off", {"count": "three", "unknown": None}, {"count": "three", "unknown": None}),
    ],
)
async def test_a_tool_chooses_how_its_arguments_are_checked(
    checking: Any, arguments: dict[str, Any], kept: dict[str, Any] | None
) -> None:
    reached: list[dict[str, Any]] = []

    class Keeper(BaseTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            reached.append(parameters)
            return ToolResponse(text="kept")

    tool = Keeper({}, KEPT)
    if checking is not None:
        tool.check_arguments = checking
    result = await execute(tool, **arguments)
    assert reached == ([] if kept is None else [kept])
    assert (kind_of(result) is None) == (kept is not None)
    assert kept is not None or "expected an integer" in str(result.response.text)


@pytest.mark.virtual_time
async def test_a_function_can_have_its_arguments_coerced() -> None:
    @function_tool(check_arguments="coerce")
    def double(amount: int) -> int:
        """Double a number."""
        return 2 * amount

    assert (await execute(double, amount="4")).response.text == "8"


BACKTRACKS = "^(a+)+$"
ATTACK = "a" * 5_000 + "!"


def loaded(**parameters: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "t", "parameters": parameters}}
    check_tool_schema(tool, where="the schema of tool t")
    return tool


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({"properties": {"x": {"pattern": BACKTRACKS}}}, {"x": ATTACK}),
        (
            {"patternProperties": {BACKTRACKS: {"type": "integer"}}, "additionalProperties": False},
            {ATTACK: 1},
        ),
        (
            {"properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"pattern": BACKTRACKS}}},
            {"x": ATTACK},
        ),
    ],
)
def test_a_backtracking_pattern_is_matched_at_once(schema: dict[str, Any], arguments: dict[str, Any]) -> None:
    fault = check_arguments(loaded(**schema), arguments)
    assert fault is not None
    assert len(fault) < 1_000


def test_a_pattern_that_re2_cannot_match_is_not_checked() -> None:
    schema = loaded(
        properties={"password": {"type": "string", "pattern": "^(?=.*[A-Z])"}, "b": {"pattern": r"(a)\1"}},
        patternProperties={"^(?!x)": {"type": "string"}},
    )
    assert check_arguments(schema, {"password": "lower", "b": "ab"}) is None
    assert "expected a string" in str(check_arguments(schema, {"password": 1}))


@pytest.mark.parametrize(
    ("pattern", "fits", "does_not"),
    [
        (r"^\u0041\/[\u4e00-\u9fa5]+$", "A/\u4f60\u597d", "A/no"),
        (r"^\p{L}+$", "\u03b1\u03b2", "12"),
        (r"^(?<year>\d{4})$", "2024", "\u0662\u0660\u0662\u0664"),
        ("^[a-z]+$", "ab", "ab\ud800"),
    ],
)
def test_the_pattern_syntax_of_json_schemas_is_supported(pattern: str, fits: str, does_not: str) -> None:
    validator = SchemaValidator({"pattern": pattern})
    assert validator.find_errors(fits) == []
    assert validator.find_errors(does_not) != []


@pytest.mark.parametrize("keyword", ["$ref", "$dynamicRef"])
def test_references_to_other_documents_are_not_fetched(keyword: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def urlopen(*args: Any, **options: Any) -> Any:
        raise AssertionError("fetched")

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    for reference in ("http://127.0.0.1:9/x", "#/$defs/nothing"):
        fault = check_arguments(loaded(properties={"x": {keyword: reference}}), {"x": 1})
        assert "cannot be validated against the tool's schema" in str(fault)


def test_a_schema_within_itself_is_followed_as_far_as_the_value_goes() -> None:
    child = {"child": {"$ref": "#/$defs/tree"}}
    tree = {"type": "object", "properties": child, "additionalProperties": False}
    schema = loaded(properties={"tree": {"$ref": "#/$defs/tree"}}, **{"$defs": {"tree": tree}})
    assert check_arguments(schema, {"tree": {"child": {"child": {}}}}) is None
    assert "has no argument 'kid'" in str(check_arguments(schema, {"tree": {"child": {"kid": {}}}}))
    assert check_arguments(schema, {"tree": 1}) == "argument 'tree' is 1, an integer; expected an object"
    deep: dict[str, Any] = {}
    for _ in range(500):
        deep = {"child": deep}
    assert "nested too deeply" in str(check_arguments(schema, {"tree": deep}))
    assert "nested too deeply" in str(check_arguments(loaded(**{"$ref": "#"}), {"x": 1}))


def test_a_client_cannot_send_a_deep_or_invalid_schema() -> None:
    def request(parameters: dict[str, Any]) -> ChatCompletionRequest:
        tool = {"type": "function", "function": {"name": "t", "parameters": parameters}}
        return ChatCompletionRequest.model_validate(
            {"model": "m", "messages": [{"role": "user", "content": "?"}], "tools": [tool]}
        )

    deep: dict[str, Any] = {}
    for _ in range(2_000):
        deep = {"properties": {"x": deep}}
    request({"properties": {"x": {"pattern": "^(?=look-around is only shown to the model)"}}})
    with pytest.raises(ValueError, match="not a valid JSON schema"):
        request(deep)
    with pytest.raises(ValueError, match="not a valid JSON schema: properties"):
        request({"properties": 3})


@given(
    st.sampled_from(
        [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
            {"patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
            {"properties": {"a": {"pattern": "^[ab]*$"}}, "minProperties": 1},
            {"$schema": "http://json-schema.org/draft-07/schema#", "propertyNames": {"pattern": "a"}},
        ]
    ),
    st.dictionaries(
        st.sampled_from(["a", "b", "ab"]),
        st.recursive(
            st.one_of(st.booleans(), st.integers(0, 2), st.just(1.0), st.sampled_from(["", "a", "c"])),
            lambda inner: st.lists(inner, max_size=3),
            max_leaves=5,
        ),
        max_size=3,
    ),
)
def test_the_validator_accepts_what_the_standard_accepts(
    schema: dict[str, Any], value: dict[str, Any]
) -> None:
    assert (SchemaValidator(schema).find_errors(value) == []) == Draft202012Validator(schema).is_valid(value)

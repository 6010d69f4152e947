"""Untrusted schemas: none blocks the event loop, fetches anything, or crashes the process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from agent_loop.errors import ConfigError
from agent_loop.serve.chat_requests import ChatCompletionRequest
from agent_loop.tools import json_schema
from agent_loop.tools.json_schema import (
    BoundedValidator,
    InvalidSchema,
    PatternRefused,
    TooManySteps,
    check_applicable,
    check_json_schema,
    pattern_of,
)
from agent_loop.tools.schema import check_arguments, check_tool_schema
from agent_loop.tools.web.openapi import openapi_tools

BACKTRACKS = "^(a+)+$"
ATTACK = "a" * 5_000 + "!"


def tool(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "t", "parameters": parameters}}


def loaded(**parameters: Any) -> dict[str, Any]:
    check_tool_schema(tool(**parameters), where="the schema of tool t")
    return tool(**parameters)


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({"properties": {"x": {"pattern": BACKTRACKS}}}, {"x": ATTACK}),
        (
            {"patternProperties": {BACKTRACKS: {"type": "integer"}}, "additionalProperties": False},
            {ATTACK: 1},
        ),
        ({"propertyNames": {"pattern": BACKTRACKS}}, {ATTACK: 1}),
        ({"properties": {"x": {"items": {"not": {"not": {"pattern": BACKTRACKS}}}}}}, {"x": [ATTACK]}),
        (
            {"properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"pattern": BACKTRACKS}}},
            {"x": ATTACK},
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "properties": {
                    "x": {"$schema": "http://json-schema.org/draft-07/schema#", "pattern": BACKTRACKS}
                },
            },
            {"x": ATTACK},
        ),
    ],
)
def test_a_backtracking_pattern_is_matched_at_once(schema: dict[str, Any], arguments: dict[str, Any]) -> None:
    fault = check_arguments(loaded(**schema), arguments)
    assert fault is not None
    assert len(fault) < 1_000


@pytest.mark.parametrize("pattern", ["^(?=.*[A-Z]).{8,}$", r"(a)\1", "(", r"\p{L}{1,900}{1,900}", "[^]"])
def test_a_pattern_that_cannot_be_bounded_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(properties={"password": {"type": "string", "pattern": pattern}})
    message = str(caught.value)
    assert message.startswith("the schema of tool t: function.parameters of 't'")
    assert repr(pattern) in message
    assert "rewrite it without look-around and back-references, or leave it out" in message


def test_a_pattern_for_property_names_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="cannot be matched in bounded time"):
        loaded(patternProperties={"^(?!x)": {}})
    with pytest.raises(ConfigError, match="write additionalProperties for the former"):
        loaded(patternProperties={"^x": {}}, unevaluatedProperties=False)


@pytest.mark.parametrize(
    ("pattern", "fits", "does_not"),
    [
        (r"^\u0041\/[\u4e00-\u9fa5]+$", "A/\u4f60\u597d", "A/no"),
        (r"^\u{1F600}$", "\U0001f600", "x"),
        (r"^\p{Script=Greek}+$", "\u03b1\u03b2", "ab"),
        (r"^[\w+=,.@-]{1,2048}$", "a.b@c", "a b"),
        (r"^[[a-c]{2,}$", "[a", "[d"),
        (r"^a\{3000}$", "a{3000}", "aaa"),
        (r"^[{1,2048}]+$", "{2,1}", "x"),
        (r"^(?<year>\d{4})$", "2024", "\u0662\u0660\u0662\u0664"),
    ],
)
def test_the_pattern_syntax_of_json_schemas_is_supported(pattern: str, fits: str, does_not: str) -> None:
    compiled = pattern_of(pattern)
    assert compiled.is_in(fits)
    assert not compiled.is_in(does_not)


def test_half_a_surrogate_pair_matches_no_letter() -> None:
    assert not pattern_of("^[a-z]+$").is_in("ab\ud800")
    with pytest.raises(PatternRefused, match="half of a surrogate pair"):
        pattern_of("\ud800")


def test_a_text_that_is_too_long_for_its_pattern_is_reported_to_the_model() -> None:
    schema = loaded(properties={"x": {"pattern": "(?:.?.?.?){300}x"}})
    assert "takes too long" in str(check_arguments(schema, {"x": "\u03b1" * 100_000}))


def test_references_that_double_at_each_level_take_a_bounded_number_of_steps() -> None:
    levels = {f"l{n}": {"items": {"allOf": [{"$ref": f"#/$defs/l{n + 1}"}] * 2}} for n in range(40)}
    schema = loaded(properties={"x": {"$ref": "#/$defs/l0"}}, **{"$defs": {**levels, "l40": {}}})
    value: list[Any] = []
    for _ in range(45):
        value = [value]
    assert "takes too long" in str(check_arguments(schema, {"x": value}))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    ],
)
def test_a_reference_to_itself_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"a \$ref in it refers back to itself"):
        loaded(**schema)


@pytest.mark.parametrize("keyword", ["$ref", "$dynamicRef"])
def test_references_to_other_documents_are_not_fetched(keyword: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def urlopen(*args: Any, **options: Any) -> Any:
        raise AssertionError("fetched")

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    with pytest.raises(ConfigError, match=r"refers to 'http://127.0.0.1:9/x', which it does not contain"):
        loaded(properties={"x": {keyword: "http://127.0.0.1:9/x"}})
    hidden = {"$id": "http://127.0.0.1:9/inner", "$ref": "#/$defs/known"}
    schema = tool(properties={"x": hidden}, **{"$defs": {"known": {}}})
    assert "cannot be validated against the tool's schema" in str(check_arguments(schema, {"x": 1}))


def deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"properties": {"x": schema}}
    return schema


def test_a_schema_that_is_too_deep_or_too_large_is_refused() -> None:
    with pytest.raises(ConfigError, match="nested more than 64 levels deep"):
        loaded(**deep(10_000))
    loaded(**deep(30))
    shared: dict[str, Any] = {}
    for _ in range(30):
        shared = {"allOf": [shared, shared]}
    with pytest.raises(ConfigError, match="more than 100000 parts"):
        loaded(**shared)
    endless: dict[str, Any] = {}
    endless["properties"] = {"x": endless}
    with pytest.raises(ConfigError, match="nested more than"):
        loaded(**endless)


def test_a_client_cannot_send_a_deep_or_invalid_schema() -> None:
    def request(parameters: dict[str, Any]) -> ChatCompletionRequest:
        return ChatCompletionRequest.model_validate(
            {"model": "m", "messages": [{"role": "user", "content": "?"}], "tools": [tool(**parameters)]}
        )

    request({"properties": {"x": {"pattern": "^(?=look-around is only shown to the model)"}}})
    with pytest.raises(ValueError, match="not a valid JSON schema: it is nested more than 64 levels deep"):
        request(deep(100))
    with pytest.raises(ValueError, match="not a valid JSON schema: properties"):
        request({"properties": 3})


@given(
    st.sampled_from(
        [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
            {"patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
            {"properties": {"a": {"uniqueItems": True}}},
            {"properties": {"a": {"pattern": "^[ab]*$"}}, "minProperties": 1},
            {"propertyNames": {"pattern": "a"}},
            {"unevaluatedProperties": False, "allOf": [{"properties": {"a": {}}}]},
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
    assert (BoundedValidator(schema).find_errors(value) == []) == Draft202012Validator(schema).is_valid(value)


def test_the_step_limit_applies_to_each_value_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_schema, "MAX_STEPS", 100)
    validator = BoundedValidator({"items": {"type": "integer"}})
    with pytest.raises(TooManySteps):
        validator.find_errors([1] * 100)
    for _ in range(3):
        assert validator.find_errors([1] * 90) == []


def test_a_schema_may_have_a_dialect_and_an_id() -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "https://example.org/s",
        "$ref": "#/$defs/a",
        "$defs": {"a": {"type": "object"}},
    }
    check_json_schema(schema)
    check_applicable(schema)
    assert BoundedValidator(schema).find_errors({}) == []
    assert len(BoundedValidator(schema).find_errors(1)) == 1
    with pytest.raises(InvalidSchema):
        check_json_schema({"type": "objekt"})


def specification(folder: Path, schema: Any, **components: Any) -> dict[str, Any]:
    body = {"content": {"application/json": {"schema": schema}}}
    spec = {
        "openapi": "3.1.0",
        "servers": [{"url": "http://127.0.0.1:9"}],
        "paths": {"/x": {"post": {"operationId": "put_x", "requestBody": body}}},
        "components": {"schemas": components},
    }
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    return {"spec": str(path)}


def test_a_specification_cannot_refer_to_other_documents(tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"type": "object", "description": "a secret"}')
    with pytest.raises(ConfigError, match=r"refers to another document, 'file://.*', which is not fetched"):
        openapi_tools(specification(tmp_path, {"$ref": secret.as_uri()}))


def test_a_specification_whose_references_double_is_refused(tmp_path: Path) -> None:
    levels = {
        f"l{n}": {
            "type": "object",
            "properties": {name: {"$ref": f"#/components/schemas/l{n + 1}"} for name in "ab"},
        }
        for n in range(18)
    }
    with pytest.raises(ConfigError, match="too large for a model to read; exclude it"):
        openapi_tools(specification(tmp_path, {"$ref": "#/components/schemas/l0"}, **levels, l18={}))


def test_a_pattern_of_a_specification_is_refused_with_its_operation(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "^(?!a)"}}}
    with pytest.raises(
        ConfigError, match=r"operation 'put_x': function\.parameters of 'put_x' .*the pattern"
    ):
        openapi_tools(specification(tmp_path, schema))

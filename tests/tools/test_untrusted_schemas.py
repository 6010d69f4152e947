"""Schemas of strangers: none blocks the event loop, fetches anything, or crashes the process."""

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
from agent_loop.tools.json_schema import SchemaValidator
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
    tree = {
        "type": "object",
        "properties": {"child": {"$ref": "#/$defs/tree"}},
        "additionalProperties": False,
    }
    schema = loaded(properties={"tree": {"$ref": "#/$defs/tree"}}, **{"$defs": {"tree": tree}})
    assert check_arguments(schema, {"tree": {"child": {"child": {}}}}) is None
    assert "has no argument 'kid'" in str(check_arguments(schema, {"tree": {"child": {"kid": {}}}}))
    deep: dict[str, Any] = {}
    for _ in range(500):
        deep = {"child": deep}
    assert "nested too deeply" in str(check_arguments(schema, {"tree": deep}))
    assert "nested too deeply" in str(check_arguments(loaded(**{"$ref": "#"}), {"x": 1}))


def test_a_client_cannot_send_a_deep_or_invalid_schema() -> None:
    def request(parameters: dict[str, Any]) -> ChatCompletionRequest:
        return ChatCompletionRequest.model_validate(
            {"model": "m", "messages": [{"role": "user", "content": "?"}], "tools": [tool(**parameters)]}
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


@pytest.mark.parametrize("reference", ["file:///etc/passwd", "#/components/schemas/Nothing"])
def test_a_specification_cannot_refer_to_other_documents(reference: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'put_x' refers to what its document does not contain, .* exclude it"
    ):
        openapi_tools(specification(tmp_path, {"$ref": reference}))


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

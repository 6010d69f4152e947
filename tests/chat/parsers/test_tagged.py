"""Formats with values as bare text: Qwen3-Coder and GLM."""

from __future__ import annotations

from typing import Any

import pytest

from agent_loop.chat.parsers import GlmToolParser, Qwen3CoderToolParser
from agent_loop.types import MalformedCall, ToolCall

QWEN, GLM = Qwen3CoderToolParser(), GlmToolParser()


def schema(**properties: Any) -> list[dict[str, Any]]:
    definitions = {"Text": {"type": "string", "enum": ["123", "red"]}}
    parameters = {"type": "object", "properties": properties, "$defs": definitions}
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def in_qwen(**values: str) -> str:
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=f>\n{tags}</function>\n</tool_call>"


def in_glm(**values: str) -> str:
    tags = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items()
    )
    return f"<tool_call>f\n{tags}</tool_call>"


TYPED = [
    ("123", {"type": "string"}, "123"),
    ('{"a": 1}', {"type": "string"}, '{"a": 1}'),
    ("2", {"enum": ["1", 2]}, 2),
    ("123", {"allOf": [{"type": "string"}]}, "123"),
    ("123", {"$ref": "#/$defs/Text"}, "123"),
    ("123", {"anyOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}]}, "123"),
    ("null", {"anyOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}]}, None),
    ("123", {"$ref": "#/$defs/Missing"}, 123),
    ("5", {"type": 7, "anyOf": 5, "enum": 3}, "5"),
    ("123", {"type": "integer"}, 123),
    ("3.0", {"type": "integer"}, 3),
    ("True", {"type": "boolean"}, True),
    ("None", {"type": ["string", "null"]}, None),
    ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
    ("no", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "no"),
    ("5", {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/x"}]}, 5),
    ("[1, 2]", {"type": "array"}, [1, 2]),
    ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
    ("abc", {"type": "integer"}, "abc"),
    ("[1, 2", {"type": "array"}, "[1, 2"),
    ("5", {}, 5),
]
UNTYPED = [
    ("123", 123),
    ("true", True),
    ("None", None),
    ('{"a": {"b": [1]}}', {"a": {"b": [1]}}),
    ('"quoted"', '"quoted"'),
    ("plain text", "plain text"),
    ("", ""),
    ("NaN", "NaN"),
    ("[1, 2", "[1, 2"),
    ("9" * 5000, "9" * 5000),
    ("a\n\nb\n", "a\n\nb\n"),
    ("  if x < 1:\n    <b>y</b> </think>", "  if x < 1:\n    <b>y</b> </think>"),
]


@pytest.mark.parametrize(("text", "parameter", "value"), TYPED)
def test_the_schema_decides_the_type(text: str, parameter: dict[str, Any], value: Any) -> None:
    tools = schema(x=parameter)
    for parsed in (QWEN.parse(in_qwen(x=text), tools=tools), GLM.parse(in_glm(x=text), tools=tools)):
        [call] = parsed.tool_calls
        assert call == ToolCall("f", {"x": value})
        assert type(call.arguments["x"]) is type(value)


@pytest.mark.parametrize(("text", "value"), UNTYPED)
def test_without_a_schema_a_value_has_the_type_of_its_json(text: str, value: Any) -> None:
    for parsed in (QWEN.parse(in_qwen(x=text)), GLM.parse(in_glm(x=text))):
        assert parsed.calls == (ToolCall("f", {"x": value}),)


def test_invalid_schemas_are_ignored() -> None:
    for tools in (
        [{}],
        [{"function": None}],
        [{"function": {"name": "f", "parameters": None}}],
        schema(x=None),
    ):
        assert QWEN.parse(in_qwen(x="1"), tools=tools).tool_calls[0].arguments == {"x": 1}


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call><function=f><parameter=x>1</parameter></function></tool_call>",
        "<tool_call>\n<function=f>\n<parameter=x>\n1</parameter>\n</function>\n</tool_call>",
    ],
)
def test_line_breaks_around_values_are_optional(text: str) -> None:
    assert QWEN.parse(text).calls == (ToolCall("f", {"x": 1}),)


def test_glm_may_leave_out_line_breaks_and_end_with_the_next_role() -> None:
    text = "<think></think>Sure.<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call><|observation|>"
    parsed = GLM.parse(text)
    assert parsed.calls == (ToolCall("f", {"x": 1}),)
    assert parsed.content == "Sure."


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("<tool_call></tool_call>", "not followed by <function=name>"),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "not followed by <function=name>"),
        ("<tool_call><function=></function></tool_call>", "not followed by <function=name>"),
        ("<tool_call><function=f><parameter=x>1</function></tool_call>", "'x' is not closed"),
        (
            "<tool_call><function=f><parameter=x>1<parameter=y>2</parameter></function></tool_call>",
            "'x' is not",
        ),
        (
            "<tool_call><function=f><parameter=x>1</parameter></tool_call>",
            "neither another argument nor </function>",
        ),
        ("<tool_call><function=f><parameter=x>1</parameter>oops</function></tool_call>", "neither another"),
        (
            "<tool_call><function=f></function><function=g></function></tool_call>",
            "neither another argument nor",
        ),
        (f"<tool_call><function=f>{'<parameter=x>1</parameter>' * 2}</function></tool_call>", "given twice"),
        ("<tool_call><function=f><parameter=x>1</parameter></function>", "not closed with </tool_call>"),
        ("<function=f><parameter=x>1</parameter></function></tool_call>", "not inside <tool_call>"),
    ],
)
def test_an_invalid_qwen_call_is_malformed_with_the_reason(text: str, complaint: str) -> None:
    first, second = QWEN.parse(f"{text} {in_qwen(x='1')}").calls
    assert isinstance(first, MalformedCall)
    assert complaint in first.error
    assert second == ToolCall("f", {"x": 1})

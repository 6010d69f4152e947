from __future__ import annotations

import pytest

from agent_loop.chat.parsers import Llama3JsonToolParser
from agent_loop.types import MalformedCall, ParsedCompletion, ToolCall

PARSER = Llama3JsonToolParser()
CALL = '{"name": "add", "parameters": {"a": 1}}'
ADD = ToolCall("add", {"a": 1})


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        f"<|python_tag|>{CALL}<|eom_id|>",
        f"{CALL}<|eot_id|>",
        '{"type": "function", "name": "add", "parameters": {"a": 1}}',
        '{"name": "add", "arguments": {"a": 1}}',
        '{"name": "add", "parameters": "{\\"a\\": 1}"}',
        '{\n  "name": "add",\n  "parameters": {\n    "a": 1\n  }\n}',
    ],
)
def test_a_call_is_parsed_in_each_of_its_forms(text: str) -> None:
    assert PARSER.parse(text) == ParsedCompletion("", (ADD,))


@pytest.mark.parametrize("separator", ["; ", "\n", "", ";\n"])
def test_several_calls_keep_their_order(separator: str) -> None:
    parsed = PARSER.parse(separator.join([CALL, CALL.replace("add", "sub"), CALL]))
    assert [call.name for call in parsed.tool_calls] == ["add", "sub", "add"]
    assert parsed.content == ""


def test_text_around_calls_is_kept() -> None:
    parsed = PARSER.parse(f"I use {{add}}: {CALL} then wait")
    assert parsed.content == "I use {add}:  then wait"
    assert parsed.calls == (ADD,)


@pytest.mark.parametrize(
    "text",
    [
        'Bob is {"name": "Bob", "age": 3}.',
        "In Python: {'name': 'Bob'}",
        'The list: {"tools": [{"name": "add", "parameters": {}}]}',
        r"\frac{1}{2}",
        "{",
        'It began with {"name": "B',
    ],
)
def test_other_json_is_text(text: str) -> None:
    assert PARSER.parse(text) == ParsedCompletion(text)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{'name': 'add', 'parameters': {'a': 1}}", "double quotes"),
        ('{"name": "add", "parameters": {"a": 1}', "not valid JSON"),
        ('{"name": "add", "parameters": {"a": 1,}}', "not valid JSON"),
        ('{"name": "add", "parameters": [1]}', "must be a JSON object"),
        ('{"name": "add", "parameters": "a"}', "is not valid JSON"),
        ('{"name": "", "parameters": {}}', '"name"'),
        ('<|python_tag|>add.call(a="1")', "not followed by a JSON object"),
    ],
)
def test_an_invalid_call_is_malformed_with_the_reason(text: str, complaint: str) -> None:
    first, second = PARSER.parse(f"{text};\n{CALL}").calls
    assert isinstance(first, MalformedCall)
    assert complaint in first.error
    assert second == ADD


def test_a_completion_that_is_an_incomplete_call_is_malformed() -> None:
    assert len(PARSER.parse('{"name": "add", "para').malformed_calls) == 1


def test_a_call_inside_a_malformed_call_is_not_parsed() -> None:
    parsed = PARSER.parse(f'{{"name": oops, "parameters": {CALL}}}')
    assert [type(call) for call in parsed.calls] == [MalformedCall]

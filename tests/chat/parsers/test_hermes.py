from __future__ import annotations

import pytest

from agent_loop.chat.parsers import HermesToolParser
from agent_loop.types import MalformedCall, ToolCall

PARSER = HermesToolParser()
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_text_around_calls_is_kept_and_calls_keep_their_order() -> None:
    parsed = PARSER.parse(f"First. {CALL} Then. <tool_call>oops</tool_call>{CALL} Done.")
    assert parsed.content == "First.  Then.  Done."
    assert [type(call) for call in parsed.calls] == [ToolCall, MalformedCall, ToolCall]
    assert parsed.tool_calls[0] == ToolCall("add", {"a": 1})


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ('{"name": "add", "arguments": {"a": 1}', "not valid JSON"),
        ("{'name': 'add'}", "double quotes"),
        ('{"name": "a"}{"name": "b"}', "one call at a time"),
        ('{"name": "a", "arguments": {"k": 1, "k": 2}}', 'the key "k" is given twice'),
        ('{"name": "a", "arguments": {"k": NaN}}', "NaN is not a JSON value"),
        ('{"name": "a", "arguments": {"k": 1e999}}', "too large"),
        ('{"name": "a", "arguments": {"k": ' + "9" * 5000 + "}}", "too many digits"),
        ('{"name": "a", "arguments": {"k": "\\ud800"}}', "half of a surrogate pair"),
        ('{"name": "a", "args": {"k": 1}}', 'no "arguments"'),
        ('["add"]', "must be a JSON object"),
        ('{"arguments": {}}', '"name"'),
        ('{"name": 3}', '"name"'),
        ('{"name": "add", "arguments": [1]}', '"arguments"'),
        ('{"name": "add", "arguments": "a"}', '"arguments"'),
    ],
)
def test_an_invalid_call_is_malformed_with_the_reason(body: str, complaint: str) -> None:
    [call] = PARSER.parse(f"<tool_call>{body}</tool_call>").calls
    assert isinstance(call, MalformedCall)
    assert complaint in call.error


def test_a_call_that_is_not_closed_is_malformed_and_the_next_call_is_parsed() -> None:
    first, second = PARSER.parse(f'<tool_call>{{"name": "add"}} {CALL}').calls
    assert isinstance(first, MalformedCall)
    assert "not closed" in first.error
    assert second == ToolCall("add", {"a": 1})


def test_a_string_may_contain_the_tags_of_the_format() -> None:
    text = "</tool_call><tool_call>{</think>"
    [call] = PARSER.parse(
        f'<tool_call>{{"name": "say", "arguments": {{"text": "{text}"}}}}</tool_call>'
    ).calls
    assert call == ToolCall("say", {"text": text})


def test_several_blocks_of_reasoning_are_joined_and_a_call_between_them_counts() -> None:
    parsed = PARSER.parse(f"<think>a</think>{CALL}<think>b</think>")
    assert parsed.reasoning == "a\nb"
    assert len(parsed.tool_calls) == 1


def test_a_second_closing_tag_of_reasoning_is_text_and_drops_no_call() -> None:
    parsed = PARSER.parse(f"<think>a</think>{CALL} See </think>.")
    assert len(parsed.tool_calls) == 1
    assert parsed.content == "See </think>."


def test_an_invalid_call_inside_reasoning_that_the_prompt_opened_is_not_a_call() -> None:
    parsed = PARSER.parse(f"I could write <tool_call> but </think>{CALL}")
    assert len(parsed.calls) == 1
    assert parsed.reasoning == "I could write <tool_call> but "

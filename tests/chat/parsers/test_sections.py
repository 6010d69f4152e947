"""Formats with a section of calls: DeepSeek and Kimi."""

from __future__ import annotations

import pytest

from agent_loop.chat.parsers import DeepSeekV3ToolParser, KimiK2ToolParser, ToolParser
from agent_loop.chat.parsers.sections import DEEPSEEK as MARKS
from agent_loop.chat.parsers.sections import SEPARATOR
from agent_loop.types import MalformedCall, ParsedCompletion, ToolCall

DEEPSEEK, KIMI = DeepSeekV3ToolParser(), KimiK2ToolParser()
KIMI_CALL = '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
OPEN, CLOSE = MARKS.call_open, MARKS.call_close


def deepseek(*bodies: str) -> str:
    calls = "\n".join(f"{OPEN}{body}{CLOSE}" for body in bodies)
    return f"{MARKS.section_open}{calls}{MARKS.section_close}"


@pytest.mark.parametrize(
    "body",
    [
        f'function{SEPARATOR}add\n```json\n{{"a": 1}}\n```',
        f'function{SEPARATOR}add\n```json\n{{"a": 1}}\n```\n',
        f'function{SEPARATOR}add\n```json\n"{{\\"a\\": 1}}"\n```',
        f'add{SEPARATOR}{{"a": 1}}',
        f'add{SEPARATOR}\n{{"a": 1}}\n',
    ],
)
def test_deepseek_calls_are_parsed_with_and_without_a_fence(body: str) -> None:
    assert DEEPSEEK.parse(f"Let me add.{deepseek(body)}") == ParsedCompletion(
        "Let me add.", (ToolCall("add", {"a": 1}),)
    )


def test_kimi_keeps_the_id_that_names_the_tool() -> None:
    section = (
        f"<|tool_calls_section_begin|>{KIMI_CALL}{KIMI_CALL.replace(':0', ':1')}<|tool_calls_section_end|>"
    )
    parsed = KIMI.parse(f"<think>hm</think>Adding. {section}")
    assert [(call.name, call.id) for call in parsed.tool_calls] == [
        ("add", "functions.add:0"),
        ("add", "functions.add:1"),
    ]
    assert (parsed.content, parsed.reasoning) == ("Adding.", "hm")


@pytest.mark.parametrize(
    ("call_id", "name"),
    [("functions.a.b:12", "a.b"), ("add:0", "add"), ("functions.add", "add"), ("call_7", "call_7")],
)
def test_kimi_ids_of_other_forms_give_the_name_if_possible(call_id: str, name: str) -> None:
    [call] = KIMI.parse(KIMI_CALL.replace("functions.add:0", call_id)).tool_calls
    assert (call.name, call.id) == (name, call_id)


@pytest.mark.parametrize("parser", [DEEPSEEK, KIMI], ids=["deepseek", "kimi"])
def test_a_section_without_a_call_is_malformed(parser: ToolParser) -> None:
    assert parser.call_start is not None
    [call] = parser.parse(f"{parser.call_start} nothing").calls
    assert isinstance(call, MalformedCall)
    assert "not followed by" in call.error


def test_complete_calls_of_a_section_that_is_not_closed_are_parsed() -> None:
    assert len(KIMI.parse(f"<|tool_calls_section_begin|>{KIMI_CALL}").tool_calls) == 1


def test_a_string_may_contain_the_closing_tag() -> None:
    text = KIMI_CALL.replace("1}", '"<|tool_call_end|>"}')
    assert KIMI.parse(text).tool_calls[0].arguments == {"a": "<|tool_call_end|>"}

"""Tests of the translation between the Responses API and chat requests."""

from __future__ import annotations

from typing import Any

import pytest

from agent_loop.serve.responses_requests import (
    CallRecord,
    ResponsesRequest,
    TranslatedResponse,
    read_encrypted,
    translate_response,
    write_encrypted,
)

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "3"}


def prepared(**fields: Any) -> TranslatedResponse:
    request = ResponsesRequest.read({"model": "m", **fields})
    return translate_response(request, calls=CallRecord())


def messages(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    chat = prepared(input=list(items), **fields).chat
    return [message.model_dump(exclude_none=True) for message in chat.messages]


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


@pytest.mark.parametrize(
    ("items", "turns"),
    [
        ([said("a"), said("b")], [("a", ""), ("b", "")]),
        ([thought("x"), said("a"), thought("y"), said("b")], [("a", "x"), ("b", "y")]),
        ([said("a"), thought("y")], [("a", "y")]),
        ([thought("x"), said("a"), thought("y"), CALL], [("a", "xy")]),
        ([CALL, said("a")], [("a", "")]),
        ([thought("x")], [("", "x")]),
    ],
)
def test_a_second_message_begins_another_turn(items: list[Any], turns: list[tuple[str, str]]) -> None:
    read = [(message["content"], message.get("reasoning_content", "")) for message in messages(*items)]
    assert read == turns


def test_calls_that_follow_results_of_their_own_turn_belong_to_it() -> None:
    calls = CallRecord()
    for call_id in ("c1", "c2"):
        calls.add(call_id, response_id="r")
    items = [
        {**CALL, "call_id": i} if is_call else {**OUTPUT, "call_id": i}
        for i in ("c1", "c2", "c3")
        for is_call in (True, False)
    ]
    request = ResponsesRequest.read({"model": "m", "input": items})
    chat = translate_response(request, calls=calls).chat
    assert [message.role for message in chat.messages] == ["assistant", "tool", "tool", "assistant", "tool"]


def test_repeated_call_ids_are_not_taken_for_one_turn() -> None:
    calls = CallRecord()
    for number in range(2):
        calls.add("c1", response_id=f"r{number}")
    request = ResponsesRequest.read({"model": "m", "input": [CALL, OUTPUT, CALL, OUTPUT]})
    chat = translate_response(request, calls=calls).chat
    assert [message.role for message in chat.messages] == ["assistant", "tool"] * 2


def test_only_the_latest_calls_are_kept() -> None:
    calls = CallRecord(max_calls=2)
    for call_id in ("c1", "c2", "c3"):
        calls.add(call_id, response_id="r", text="{}", arguments={})
    assert calls.custom_arguments("c1", "{}") is None
    assert calls.custom_arguments("c3", "{}") == {}
    assert calls.custom_arguments("c3", "other") is None
    assert not calls.are_of_one_turn(["c1", "c2"])


def test_parameters_have_the_names_of_chat_requests() -> None:
    schema = {"type": "object", "properties": {}}
    chat = prepared(
        input="?",
        instructions="Be brief.",
        tools=[{"type": "custom", "name": "patch"}],
        tool_choice={"type": "custom", "name": "patch"},
        parallel_tool_calls=False,
        max_output_tokens=5,
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        top_logprobs=2,
        temperature=0.5,
        top_p=0.9,
        metadata={"a": "b"},
        user="u",
        stream=True,
    ).chat
    assert [message.role for message in chat.messages] == ["system", "user"]
    assert chat.forced_tool == "patch"
    assert (chat.parallel_tool_calls, chat.max_new_tokens, chat.reasoning_effort) == (False, 5, "low")
    assert (chat.logprobs, chat.top_logprobs, chat.temperature, chat.top_p) == (True, 2, 0.5, 0.9)
    assert '"properties"' in chat.json_schema
    assert chat.stream


def test_a_grammar_is_shown_to_the_model() -> None:
    text_format = {"type": "grammar", "syntax": "lark", "definition": "start: X"}
    [tool] = (
        prepared(input="?", tools=[{"type": "custom", "name": "p", "format": text_format}]).chat.tools or []
    )
    described = tool["function"]["parameters"]["properties"]["input"]["description"]
    assert described.endswith("that matches this lark grammar:\nstart: X")


def test_reasoning_tokens_are_read_back_and_foreign_ones_are_not() -> None:
    assert read_encrypted(write_encrypted("Hm. \N{SNOWMAN}\n")) == "Hm. \N{SNOWMAN}\n"
    assert read_encrypted("gAAAA") is None
    assert read_encrypted(write_encrypted("x") + "!") is None

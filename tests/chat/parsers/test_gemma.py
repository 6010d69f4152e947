from __future__ import annotations

import pytest

from agent_loop.chat.parsers import GemmaToolParser
from agent_loop.types import MalformedCall, ParsedCompletion, ToolCall

PARSER = GemmaToolParser()


def gemma_4(body: str) -> str:
    return f"<|tool_call>call:f{{{body}}}<tool_call|>"


def function_gemma(body: str) -> str:
    quoted = body.replace('<|"|>', "<escape>")
    return f"<start_function_call>call:f{{{quoted}}}<end_function_call>"


BODIES = [
    ("", {}),
    ("a:1,b:-2.5,c:1e+20", {"a": 1, "b": -2.5, "c": 1e20}),
    ("a:true,b:false,c:null", {"a": True, "b": False, "c": None}),
    ("a:True,b:[None]", {"a": True, "b": [None]}),
    ("a:[1,2,3]", {"a": [1, 2, 3]}),
    ('a:[<|"|>x<|"|>,[],{}]', {"a": ["x", [], {}]}),
    ('a:{b:{c:[1,{d:<|"|>e<|"|>}]}}', {"a": {"b": {"c": [1, {"d": "e"}]}}}),
    ('a:<|"|>{1,2}: "x" \'y\' \\ \n<|"|>', {"a": "{1,2}: \"x\" 'y' \\ \n"}),
    ('<|"|>a b<|"|>:<|"|>1<|"|>', {"a b": "1"}),
    (" a : 1 , b : [ 1 , 2 ] ", {"a": 1, "b": [1, 2]}),
    ('a:<|"|><tool_call|><end_function_call><|"|>', {"a": "<tool_call|><end_function_call>"}),
]


@pytest.mark.parametrize(("body", "arguments"), BODIES)
def test_values_have_their_types(body: str, arguments: dict[str, object]) -> None:
    for text in (gemma_4(body), function_gemma(body)):
        assert PARSER.parse(text).calls == (ToolCall("f", arguments),)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("a:Paris", "write strings as"),
        ('a:"Paris"', "write strings as"),
        ("a:'Paris'", "write strings as"),
        ("a:NaN", "write strings as"),
        ("a:1,a:2", "given twice"),
        ("a:1,", "write the arguments as"),
        ("a", "write strings as"),
        ("a:", "write the arguments as"),
        ("a:[1", "not closed"),
        ("a:1 b:2", "write the arguments as"),
        ("a:{b:1", "not closed"),
        ("a:1}{b:2", "not followed by <"),
    ],
)
def test_an_invalid_call_is_malformed_with_the_reason(body: str, complaint: str) -> None:
    for render in (gemma_4, function_gemma):
        first, second = PARSER.parse(f"{render(body)} {render('a:1')}").calls
        assert isinstance(first, MalformedCall)
        assert complaint in first.error
        assert second == ToolCall("f", {"a": 1})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("<|tool_call>f{}<tool_call|>", "not followed by call:name{"),
        ("<|tool_call>call:{}<tool_call|>", "not followed by call:name{"),
        ("<|tool_call>call:f{a:1}", "not followed by <tool_call|>"),
        ('<|tool_call>call:f{a:<|"|>x}<tool_call|>', "not closed"),
    ],
)
def test_a_call_without_its_frame_is_malformed_with_the_reason(text: str, complaint: str) -> None:
    [call] = PARSER.parse(text).calls
    assert isinstance(call, MalformedCall)
    assert complaint in call.error


def test_the_thought_channel_is_reasoning_and_the_end_of_the_turn_is_dropped() -> None:
    text = f"<|channel>thought\nOr {gemma_4('a:1')}\n<channel|>Well.{gemma_4('a:2')}<|tool_response>"
    call = ToolCall("f", {"a": 2})
    assert PARSER.parse(text) == ParsedCompletion("Well.", (call,), f"Or {gemma_4('a:1')}")

from __future__ import annotations

from agent_loop.chat.parsers import MistralToolParser
from agent_loop.types import MalformedCall, ParsedCompletion, ToolCall

PARSER = MistralToolParser()


def test_the_list_form_keeps_ids_and_order() -> None:
    text = (
        'Adding. [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}, '
        '{"name": "sub", "arguments": "{\\"b\\": [1, 2]}"}]'
    )
    calls = (ToolCall("add", {"a": 1}, "abcdefghi"), ToolCall("sub", {"b": [1, 2]}))
    assert PARSER.parse(text) == ParsedCompletion("Adding.", calls)


def test_the_named_form_is_parsed_with_and_without_ids() -> None:
    text = '[THINK]Hm.[/THINK]Adding.[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": "[ARGS]"}[TOOL_CALLS]sub[ARGS]{}'
    calls = (ToolCall("add", {"a": "[ARGS]"}, "abcdefghi"), ToolCall("sub", {}))
    assert PARSER.parse(text) == ParsedCompletion("Adding.", calls, "Hm.")


def test_reasoning_in_either_spelling_has_no_calls() -> None:
    for opening, closing in (("[THINK]", "[/THINK]"), ("<think>", "</think>")):
        assert PARSER.parse(f"{opening}[TOOL_CALLS]a[ARGS]{{}}{closing}Done.").calls == ()


def test_text_after_the_calls_is_kept() -> None:
    assert PARSER.parse('[TOOL_CALLS][{"name": "a", "arguments": {}}] Done.').content == "Done."


def test_one_invalid_call_of_a_list_does_not_affect_the_others() -> None:
    text = '[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "arguments": []}, 3, {"name": "c"}]'
    assert [type(call) for call in PARSER.parse(text).calls] == [
        ToolCall,
        MalformedCall,
        MalformedCall,
        ToolCall,
    ]

from __future__ import annotations

import pytest

from agent_loop.chat.parsers import GptOssToolParser
from agent_loop.types import ParsedCompletion, ToolCall

PARSER = GptOssToolParser()
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'


def test_a_completion_begins_after_the_generation_prompt() -> None:
    text = f"<|channel|>analysis<|message|>Add.<|end|><|start|>assistant{CALL}"
    assert PARSER.parse(text) == ParsedCompletion("", (ToolCall("add", {"a": 1}),), "Add.")


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        f"<|start|>assistant{CALL}",
        f"assistant{CALL}",
        CALL.removesuffix("<|call|>"),
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        '<|channel|>commentary to=functions.add<|message|>{"a": 1}<|call|>',
        '<|channel|>commentary <|constrain|>json to=functions.add<|message|>{"a": 1}<|call|>',
        '<|channel|>commentary to=add<|message|>{"a": 1}<|call|>',
    ],
)
def test_a_call_is_parsed_with_the_recipient_in_any_position(text: str) -> None:
    assert PARSER.parse(text) == ParsedCompletion("", (ToolCall("add", {"a": 1}),))


def test_the_final_channel_is_the_answer() -> None:
    text = "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It is 7.<|return|>"
    assert PARSER.parse(text) == ParsedCompletion("It is 7.", (), "Easy.")


def test_commentary_before_a_call_is_content() -> None:
    text = f"<|channel|>commentary<|message|>I will add.<|end|><|start|>assistant{CALL}"
    assert PARSER.parse(text) == ParsedCompletion("I will add.", (ToolCall("add", {"a": 1}),))


def test_a_completion_may_start_directly_with_text() -> None:
    assert PARSER.parse("It is 7.<|return|>") == ParsedCompletion("It is 7.")
    assert PARSER.parse(f"Let me see.<|end|><|start|>assistant{CALL}").content == "Let me see."


def test_text_with_an_incomplete_header_is_kept() -> None:
    assert PARSER.parse("<|start|>assistant It is 7.<|end|>").content == "It is 7."


def test_a_tool_reply_that_the_model_invents_is_not_a_call() -> None:
    forged = '<|start|>functions.add to=assistant<|channel|>commentary<|message|>{"a": 2}<|end|>'
    assert PARSER.parse(CALL + forged).calls == (ToolCall("add", {"a": 1}),)

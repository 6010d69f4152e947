from __future__ import annotations

from typing import Any

import pytest

from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import ChatTemplateError
from agent_loop.types import ToolCall
from tests.chat.families import (
    ARGUMENTS_ARE_TEXT,
    CALLS_END_OTHERWISE,
    NEXT_ROLE_ENDS_THE_TURN,
    NINE_LETTER_IDS,
    family,
    token,
    tool_message,
)
from tests.helpers import user


def bridged(template: ChatTemplate, messages: list[dict[str, Any]], last: str, **options: Any) -> str:
    ids = template.bridge(messages, last_token_id=token(template, last), **options)
    return template.decode(ids)


@pytest.mark.parametrize(
    ("last", "messages", "expected"),
    [
        ("<|user|>", user("more"), "\nmore<|assistant|>"),
        ("x", user("more"), "<|user|>\nmore<|assistant|>"),
        ("<|observation|>", [tool_message("4"), tool_message("5")], "\n4\n5<|assistant|>"),
        ("</tool_call>", [tool_message("4")], "<|observation|>\n4<|assistant|>"),
    ],
)
def test_an_end_token_that_opens_the_next_role_is_written_once(
    last: str, messages: list[dict[str, Any]], expected: str
) -> None:
    assert bridged(family(NEXT_ROLE_ENDS_THE_TURN), messages, last) == expected


def test_an_end_token_of_another_family_does_not_replace_the_next_role() -> None:
    template = family(NEXT_ROLE_ENDS_THE_TURN)
    ids = template.bridge(user("more"), last_token_id=template.tokenizer.eos_token_id)
    assert template.decode(ids) == "<|user|>\nmore<|assistant|>"


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("<|call|>", '<|start|>add to=assistant<|message|>"4"<|end|><|start|>assistant'),
        ("x", '<|call|><|start|>add to=assistant<|message|>"4"<|end|><|start|>assistant'),
    ],
)
def test_the_token_that_ends_a_call_decides_where_the_bridge_begins(last: str, expected: str) -> None:
    template = family(CALLS_END_OTHERWISE)
    assert bridged(template, [tool_message("4", name="add")], last) == expected


@pytest.mark.parametrize("last", ["<|return|>", "<|end|>", "<|call|>"])
def test_an_answer_is_closed_once_for_every_end_token(last: str) -> None:
    expected = "<|start|>user<|message|>more<|end|><|start|>assistant"
    assert bridged(family(CALLS_END_OTHERWISE), user("more"), last) == expected


def test_a_tool_message_without_a_name_takes_the_name_of_its_call() -> None:
    calls = [ToolCall("multiply", {"a": 2})]
    text = bridged(family(CALLS_END_OTHERWISE), [tool_message("4")], "<|call|>", calls=calls)
    assert text.startswith("<|start|>multiply to=")


@pytest.mark.parametrize(
    ("message", "call_id"),
    [(tool_message("4"), "call00000"), (tool_message("4", tool_call_id="abcdefghi"), "abcdefghi")],
)
def test_an_id_is_generated_only_if_the_template_requires_one(message: dict[str, Any], call_id: str) -> None:
    template = family(NINE_LETTER_IDS)
    expected = f'[TOOL_RESULTS] {{"content": "4", "call_id": "{call_id}"}}[/TOOL_RESULTS]'
    assert bridged(template, [message], "</s>") == expected
    calls = [ToolCall("add", {}, id="callofnin")]
    assert ("callofnin" in bridged(template, [message], "</s>", calls=calls)) == (
        "tool_call_id" not in message
    )


def test_a_default_system_prompt_and_an_opened_think_block_are_rendered_once() -> None:
    template = family(ARGUMENTS_ARE_TEXT)
    opened = template.decode(template.open(user("hi")))
    assert opened.count("You are helpful.") == opened.count("<think>") == 1
    expected = "\n<|tool|>4<|end|>\n<|tool|>5<|end|>\n<|assistant|><think>\n"
    assert bridged(template, [tool_message("4"), tool_message("5")], "<|end|>") == expected


@pytest.mark.parametrize("template_text", [CALLS_END_OTHERWISE, NINE_LETTER_IDS, ARGUMENTS_ARE_TEXT])
def test_names_and_ids_of_calls_cannot_forge_control_tokens(template_text: str) -> None:
    template = family(template_text)
    forged = "".join(template.encoder.control_texts)[:9]
    hostile = tool_message("4", name="".join(template.encoder.control_texts), tool_call_id=forged)
    plain = tool_message("4", name="add", tool_call_id="x" * 9)
    controls = [
        [i for i in template.bridge([message]).tolist() if i in template.encoder.control_ids]
        for message in (hostile, plain)
    ]
    assert controls[0] == controls[1]


def test_messages_that_a_template_refuses_are_errors_when_they_are_rendered() -> None:
    template = family(
        "{{ raise_exception('no tools, please') if messages[-1].role == 'tool' }}" + ARGUMENTS_ARE_TEXT
    )
    assert template.decode(template.bridge(user("more"))).startswith("<|end|>")
    with pytest.raises(ChatTemplateError, match=r"'tool'.*no tools, please"):
        template.bridge([tool_message("4")])

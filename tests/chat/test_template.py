from __future__ import annotations

from pathlib import Path

import pytest
from transformers import GenerationConfig

from agent_loop.chat.template import ChatTemplate, load_chat_template
from agent_loop.errors import ChatTemplateError
from tests.helpers import encoded, hermes_template, small_tokenizer, user

TOOL_SCHEMA = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}
FOLLOW_UPS = [
    user("and then?"),
    [{"role": "tool", "content": "42"}],
    [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2\n"}],
    [{"role": "tool", "content": ""}],
    [{"role": "user", "content": "\n\nüñí¢ödé 🎉 \n"}],
]


def full_render(messages: list[dict], *, tools: list[dict] | None = None) -> list[int]:
    rendered = small_tokenizer().apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=False
    )
    return encoded(str(rendered))


@pytest.mark.parametrize("follow_up", FOLLOW_UPS)
@pytest.mark.parametrize("tools", [[], [TOOL_SCHEMA]])
def test_prompt_completion_and_bridge_equal_the_full_render(follow_up: list[dict], tools: list[dict]) -> None:
    template = hermes_template()
    opening = [{"role": "system", "content": "Be brief."}, *user("hi")]
    completion = encoded("hello<|im_end|>")
    bridged = [
        *template.open(opening, tools=tools),
        *completion,
        *template.bridge(follow_up, last_token_id=completion[-1]),
    ]
    messages = [*opening, {"role": "assistant", "content": "hello"}, *follow_up]
    assert bridged == full_render(messages, tools=tools or None)


def test_every_end_token_of_the_generation_config_ends_a_turn(tmp_path: Path) -> None:
    small_tokenizer().save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=encoded("<|im_end|><|endoftext|>")).save_pretrained(tmp_path)
    template = load_chat_template(str(tmp_path))
    other = encoded("<|endoftext|>")[0]
    assert template.parse([*encoded("hello"), other]).content == "hello"
    ids = template.bridge(user("go on"), last_token_id=other)
    assert template.decode(ids).startswith("\n<|im_start|>user")


def test_a_template_that_hides_the_assistant_turn_is_refused() -> None:
    tokenizer = small_tokenizer().__class__(
        tokenizer_object=small_tokenizer().backend_tokenizer, eos_token="<|im_end|>"
    )
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ChatTemplateError, match="cannot be bridged"):
        ChatTemplate(tokenizer)


def test_a_tokenizer_without_template_is_refused() -> None:
    tokenizer = small_tokenizer().__class__(tokenizer_object=small_tokenizer().backend_tokenizer)
    with pytest.raises(ChatTemplateError, match=r"model\.chat_template_path"):
        ChatTemplate(tokenizer)


def test_the_call_start_is_one_token_if_the_tokenizer_has_it() -> None:
    assert hermes_template().call_start_ids() == tuple(encoded("<tool_call>"))


def test_a_prompt_that_the_caller_changes_is_not_changed_for_the_next_one() -> None:
    template = hermes_template()
    first = template.open(user("x"))
    expected = first.tolist()
    first[:] = 0
    assert template.open(user("x")).tolist() == expected

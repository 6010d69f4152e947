from __future__ import annotations

from pathlib import Path

import pytest
from transformers import GenerationConfig

from agent_loop.chat.parsers import HermesToolParser
from agent_loop.chat.template import ChatTemplate, load_chat_template
from agent_loop.errors import ChatTemplateError, ConfigError
from tests.helpers import HERMES_TEMPLATE, encoded, hermes_template, small_tokenizer, user

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


def test_a_turn_truncated_by_length_is_closed_by_the_bridge() -> None:
    template = hermes_template()
    ids = template.bridge(user("go on"), last_token_id=encoded("hello")[-1])
    assert template.decode(ids).startswith("<|im_end|>\n<|im_start|>user")


def test_a_sampled_end_token_is_not_written_twice() -> None:
    template = hermes_template()
    ids = template.bridge(user("go on"), last_token_id=encoded("<|im_end|>")[0])
    assert template.decode(ids).startswith("\n<|im_start|>user")


def test_every_end_token_of_the_generation_config_ends_a_turn(tmp_path: Path) -> None:
    small_tokenizer().save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=encoded("<|im_end|><|endoftext|>")).save_pretrained(tmp_path)
    template = load_chat_template(str(tmp_path))
    other = encoded("<|endoftext|>")[0]
    assert template.parse([*encoded("hello"), other]).content == "hello"
    ids = template.bridge(user("go on"), last_token_id=other)
    assert template.decode(ids).startswith("\n<|im_start|>user")


def test_a_bridge_never_repeats_the_system_prompt() -> None:
    tokenizer = small_tokenizer().__class__(
        tokenizer_object=small_tokenizer().backend_tokenizer, eos_token="<|im_end|>"
    )
    tokenizer.chat_template = (
        "{%- if messages[0].role != 'system' %}<|im_start|>system\nDefault.<|im_end|>\n{% endif %}"
        + HERMES_TEMPLATE
    )
    template = ChatTemplate(tokenizer)
    assert "Default." in template.decode(template.open(user("hi")))
    assert "Default." not in template.decode(template.bridge(user("more")))


def test_a_completion_is_parsed_without_its_end_token() -> None:
    parsed = hermes_template().parse(encoded("hello<|im_end|>"))
    assert parsed.content == "hello"
    assert parsed.calls == ()


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


def test_an_unknown_parser_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        ChatTemplate(small_tokenizer(), tool_parser="hermis")


def test_the_call_start_is_one_token_if_the_tokenizer_has_it() -> None:
    assert hermes_template().call_start_ids() == tuple(encoded("<tool_call>"))


def test_the_parser_can_be_detected_from_the_template() -> None:
    assert isinstance(ChatTemplate(small_tokenizer(), tool_parser="auto").tool_parser, HermesToolParser)


def test_a_prompt_that_the_caller_changes_is_not_changed_for_the_next_one() -> None:
    template = hermes_template()
    first = template.open(user("x"))
    expected = first.tolist()
    first[:] = 0
    assert template.open(user("x")).tolist() == expected


def test_a_schema_that_is_changed_in_place_is_rendered_again() -> None:
    template = hermes_template()
    schema = {"type": "function", "function": {"name": "add", "parameters": {}}}
    before = template.open(user("x"), tools=[schema])
    schema["function"]["name"] = "multiply"
    assert "multiply" in template.decode(template.open(user("x"), tools=[schema]))
    assert "multiply" not in template.decode(before)

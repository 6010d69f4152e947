"""Parsers that the package does not hold: of a tokenizer's response template, and of users."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.chat.parsers import HermesToolParser, ResponseTemplateParser, ToolParser
from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import ConfigError
from agent_loop.integrations import verl
from agent_loop.serve.stream_parser import call_openings
from agent_loop.types import MalformedCall, ParsedCompletion, ToolCall
from tests.helpers import small_tokenizer

JSON_CALLS: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<bot>",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>"},
    },
}
TAGGED_CALLS: dict[str, Any] = {
    "start_anchor_pattern": "<bot>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<run (?P<name>\w+)>",
            "close_pattern": r"</run>\s*",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</(?P=key)>"},
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}
LINES: dict[str, Any] = {
    "start_anchor": "<bot>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"!(?P<name>\w+)\n",
            "close": "!end",
            "content": "kv-lines",
            "transform": [{"name": "{name}", "arguments": "{content}"}],
        },
        "content": {},
    },
}
CUSTOM_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<bot><think>{% endif %}"
)
SCHEMA = {
    "function": {
        "name": "add",
        "parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    }
}

JSON, TAGGED, KEYED = map(ResponseTemplateParser, (JSON_CALLS, TAGGED_CALLS, LINES))
CALL = '<call>{"name": "add", "arguments": {"a": 1, "b": [2, {"c": null}]}}</call>'
ADD = ToolCall("add", {"a": 1, "b": [2, {"c": None}]})


def errors(parsed: ParsedCompletion) -> list[str]:
    return [call.error for call in parsed.malformed_calls]


def test_text_reasoning_and_calls_are_separated() -> None:
    parsed = JSON.parse(f"<think>Or {CALL}?</think>First. {CALL} Then. {CALL} Done.<|im_end|>")
    assert parsed == ParsedCompletion("First.  Then.  Done.", (ADD, ADD), f"Or {CALL}?")


def test_a_completion_without_calls_is_its_text() -> None:
    assert JSON.parse("It is 7.<|im_end|>") == ParsedCompletion("It is 7.")
    assert JSON.parse("") == JSON.parse("<|im_end|>") == ParsedCompletion("")


def test_a_section_that_the_prompt_opened_after_its_anchor_continues_in_the_completion() -> None:
    parser = ResponseTemplateParser(JSON_CALLS, prompt="<bot>old</think><bot><think>")
    assert parser.parse(f"no {CALL}</think>yes {CALL}") == ParsedCompletion("yes", (ADD,), f"no {CALL}")
    assert parser.parse(f"no {CALL}") == ParsedCompletion("", (), f"no {CALL}")
    parser = ResponseTemplateParser(JSON_CALLS, prompt="<think> old words")
    assert parser.parse("hello") == ParsedCompletion("hello")


@pytest.mark.parametrize(
    "text",
    [
        CALL.removesuffix("</call>"),
        "<call></call>",
        '<call>{"name": "add", "arguments": {"a": 1, "a": 2}}</call>',
        '<call>["add"]</call>',
        f'<call>{{"name": "add", "arguments": {{"a": "{"x" * 60_000}"}}}}</call>',
    ],
    ids=["not closed", "empty", "a key twice", "a list", "too long"],
)
def test_a_call_that_cannot_be_read_is_malformed(text: str) -> None:
    parsed = JSON.parse(f"before {text}")
    assert len(parsed.malformed_calls) == 1
    assert parsed.tool_calls == []
    assert parsed.content == "before"


def test_one_broken_call_does_not_affect_the_others() -> None:
    parsed = JSON.parse(f"{CALL}<call>{{</call>{CALL}<call>")
    assert [isinstance(call, MalformedCall) for call in parsed.calls] == [False, True, False, True]


def test_bare_values_get_the_types_of_the_schema() -> None:
    text = "<run add><a>7</a><b>8</b></run>"
    assert TAGGED.parse(text, tools=[SCHEMA]).calls == (ToolCall("add", {"a": 7, "b": "8"}),)
    assert TAGGED.parse(text).calls == (ToolCall("add", {"a": "7", "b": "8"}),)


@pytest.mark.parametrize("left", ["<b>2", "2</b>", "and then", "<b>"])
def test_arguments_that_the_pattern_skips_make_the_call_malformed(left: str) -> None:
    [error] = errors(TAGGED.parse(f"<run add><a>1</a>{left}</run>"))
    assert "belongs to none of them" in error or "<b>" in error


def test_lines_without_a_key_make_the_call_malformed() -> None:
    assert KEYED.parse("so !add\na: 1\nb: x y\n!end done").calls == (ToolCall("add", {"a": "1", "b": "x y"}),)
    [error] = errors(KEYED.parse("!add\na: 1\nb\n!end"))
    assert "the line 'b' has no ':'" in error


def test_the_tokens_that_end_a_turn_may_close_a_call() -> None:
    """Some templates end a turn with a call with a special token."""
    described = copy.deepcopy(JSON_CALLS)
    described["fields"]["tool_calls"]["close"] = "<|im_end|>"
    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.chat_template, tokenizer.response_template = CUSTOM_TEMPLATE, described
    template = ChatTemplate(tokenizer, tool_parser="auto")
    text = 'so</think><call>{"name": "add", "arguments": {}}'
    assert template.parse(template.encoder.encode(f"{text}<|im_end|>")).calls == (ToolCall("add", {}),)
    assert errors(template.parse(template.encoder.encode(text))) == ["the call is not closed"]


def test_auto_uses_the_tokenizers_response_template_if_no_format_is_known() -> None:
    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.response_template = JSON_CALLS
    assert not isinstance(ChatTemplate(tokenizer, tool_parser="auto").tool_parser, ResponseTemplateParser)
    tokenizer.chat_template = CUSTOM_TEMPLATE
    template = ChatTemplate(tokenizer, tool_parser="auto")
    assert isinstance(template.tool_parser, ResponseTemplateParser)
    parsed = template.parse(template.encoder.encode(f"hm</think>So: {CALL}<|im_end|>"))
    assert parsed == ParsedCompletion("So:", (ADD,), "hm")
    assert template.tool_parser.call_start == "<call>"


@pytest.mark.parametrize(
    "described", [{"fields": {}}, {"version": 9}, "text", {"fields": {"a": {"open": ""}}}]
)
def test_an_invalid_response_template_is_refused(described: Any) -> None:
    with pytest.raises(ConfigError, match=r"response_template cannot be used: .*; name one of"):
        ResponseTemplateParser(described)


PIECES = [
    *("<call>", "</call>", "<think>", "</think>", "<|im_end|>", "<run add>", "<a>", "</a>", "</run>"),
    *("!add\n", "!end", '"', "{", "}", "\\", "x", ":", "\n"),
]


@given(st.lists(st.sampled_from(PIECES) | st.text()))
def test_the_parser_raises_for_no_text(pieces: list[str]) -> None:
    for parser in (JSON, TAGGED, KEYED):
        parsed = parser.parse("".join(pieces), tools=[SCHEMA])
        assert isinstance(parsed, ParsedCompletion)
        for call in parsed.tool_calls:
            assert call.name
            assert isinstance(call.arguments, dict)


@pytest.mark.parametrize(
    "unit", ["<call>", "</call>", "<call>{", "<call></call>", "<think>", "<run add><a>", "!add\n", CALL]
)
def test_a_megabyte_is_parsed_in_bounded_time(unit: str) -> None:
    for parser in (JSON, TAGGED, KEYED):
        start = time.process_time()
        parser.parse(unit * (1_000_000 // len(unit)))
        assert time.process_time() - start < 10


def test_expressions_that_take_forever_are_stopped() -> None:
    described = copy.deepcopy(TAGGED_CALLS)
    described["fields"]["tool_calls"]["open_pattern"] = r"(?=[\s\S]*?<go>)(?P<name>x)"
    parser = ResponseTemplateParser(described)
    start = time.process_time()
    [error] = errors(parser.parse("x" * 1_000_000))
    assert "took over 1 s to read" in error
    assert time.process_time() - start < 10


def test_empty_openings_and_closings_terminate() -> None:
    described = copy.deepcopy(TAGGED_CALLS)
    described["fields"]["tool_calls"] |= {"open_pattern": r"(?P<name>)(?=x)", "close_pattern": ""}
    assert ResponseTemplateParser(described).parse("axxb").content == "axxb"


WAS_HERMES = r"tool parser 'hermes' was agent_loop.chat.parsers.hermes.HermesToolParser; .* replaces it"
PARSER_FILE = '''\
"""Calls written as `[call]search {"query": "rain"}[/call]`."""

import json

from agent_loop import ToolParser
from agent_loop.chat.parsers import THINK
from agent_loop.types import ToolCall


@ToolParser.register("bracketed")
class BracketedToolParser(ToolParser):
    call_start = "[call]"
    call_end = "[/call]"
    reasoning_marks = (THINK,)

    def parse_call(self, text, *, tools=()):
        name, _, arguments = text.strip().partition(" ")
        return ToolCall(name, json.loads(arguments))
'''
SEARCH = '[call]search {"query": "rain"}[/call]'


@pytest.fixture
def parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToolParser:
    """Return the parser of a user's file, selected as in a configuration."""
    monkeypatch.setattr(ToolParser, "_registry", dict(ToolParser.registered()))
    file = tmp_path / "parser.py"
    file.write_text(PARSER_FILE)
    return ToolParser.get(f"{file}:BracketedToolParser")


def test_a_parser_of_twenty_lines_parses_calls_text_and_reasoning(parser: ToolParser) -> None:
    assert len(PARSER_FILE.splitlines()) <= 20
    assert type(ToolParser.get("bracketed")) is type(parser)
    parsed = parser.parse(f"<think>It may {SEARCH}</think>Let me see. {SEARCH}")
    assert parsed.reasoning == f"It may {SEARCH}"
    assert parsed.content == "Let me see."
    assert parsed.calls == (ToolCall("search", {"query": "rain"}),)
    assert call_openings(parser) == ("[call]",), "it is streamed up to its first call"


def test_a_call_that_a_users_parser_cannot_parse_is_malformed(parser: ToolParser) -> None:
    [broken, whole, cut] = parser.parse(f"[call]search {{query[/call]{SEARCH}[call]search").calls
    assert isinstance(broken, MalformedCall)
    assert broken.error.startswith("the call cannot be parsed: Expecting property name")
    assert isinstance(whole, ToolCall)
    assert cut == MalformedCall("search", "the call is not closed with [/call]")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hermis", "did you mean 'hermes'"),
        ("no_such_file.py:Parser", "no_such_file.py' does not exist"),
        ("agent_loop.types:ToolCall", "subclass of ToolParser"),
    ],
)
def test_a_parser_that_cannot_be_found_is_refused_with_the_key(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout.multi_turn.format.*{message}"):
        ToolParser.get(name)


def test_a_parser_without_marks_and_without_parse_is_refused_at_its_definition() -> None:
    with pytest.raises(TypeError, match="Unmarked has no call_start and call_end"):
        type("Unmarked", (ToolParser,), {"call_start": "<call>"})


def test_without_parse_call_a_call_is_a_json_object() -> None:
    parser = type("JsonToolParser", (ToolParser,), {"call_start": "<call>", "call_end": "</call>"})()
    [call] = parser.parse(f"<call>{json.dumps({'name': 'add', 'arguments': {'a': 1}})}</call>").calls
    assert call == ToolCall("add", {"a": 1})


def test_a_parser_in_verls_form_replaces_a_shipped_one_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verl.ToolParser, "_registry", dict(verl.ToolParser._registry))
    with pytest.warns(UserWarning, match=WAS_HERMES):

        @verl.ToolParser.register("hermes")
        class Silent(verl.ToolParser):
            async def extract_tool_calls(self, responses_ids: Sequence[int]) -> Any:
                return "", []

    assert isinstance(verl.ToolParser.get_tool_parser("hermes", None), Silent)
    assert isinstance(ToolParser.get("hermes"), HermesToolParser)

"""Tool parsers of users: by name, by file, and under a name of the package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_loop.chat.parsers import HermesToolParser, ToolParser
from agent_loop.errors import ConfigError
from agent_loop.integrations import verl
from agent_loop.serve.stream_parser import call_openings
from agent_loop.types import MalformedCall, ToolCall

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
CALL = '[call]search {"query": "rain"}[/call]'


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
    parsed = parser.parse(f"<think>It may {CALL}</think>Let me see. {CALL}")
    assert parsed.reasoning == f"It may {CALL}"
    assert parsed.content == "Let me see."
    assert parsed.calls == (ToolCall("search", {"query": "rain"}),)


def test_a_call_that_a_users_parser_cannot_parse_is_malformed(parser: ToolParser) -> None:
    [broken, whole, cut] = parser.parse(f"[call]search {{query[/call]{CALL}[call]search").calls
    assert isinstance(broken, MalformedCall)
    assert broken.error.startswith("the call cannot be parsed: Expecting property name")
    assert isinstance(whole, ToolCall)
    assert cut == MalformedCall("search", "the call is not closed with [/call]")


def test_a_users_parser_is_streamed_up_to_its_first_call(parser: ToolParser) -> None:
    assert call_openings(parser) == ("[call]",)


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

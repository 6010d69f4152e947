"""Tests of the texts that open a call, and of those that end the first call of a turn."""

from __future__ import annotations

import pytest

from agent_loop.chat.parsers import ToolParser
from agent_loop.types import ToolCall
from tests.chat.parsers.formats import FORMATS, Format

# Sources of templates that show a dialect.
MISTRAL_2025 = "[TOOL_CALLS]name[ARGS]"
MISTRAL_WITH_IDS = "[TOOL_CALLS]name[CALL_ID]id[ARGS]"
SOURCES = {"gemma": "<|tool_call>", "deepseek_v3": "```json", "pythonic": "<|tool_call_start|>"}


SEVERAL_PER_BLOCK = (
    *("llama3_json", "mistral", "granite", "pythonic"),
    *("kimi_k2", "kimi_k3", "deepseek_v3", "deepseek_v4", "minimax_m2"),
)


def call_of(form: Format) -> ToolCall:
    return ToolCall("add", {"a": "x y", "b": [1, 2]}, "functions.add:0" if form.has_ids else "")


def opening(name: str, tool: str | None, *, source: str | None = None) -> str | None:
    source = SOURCES.get(name, "") if source is None else source
    return ToolParser.get(name).forced_call(tool, chat_template=source)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("tool", [None, "add"])
def test_the_opening_of_a_call_is_what_the_format_writes(form: Format, tool: str | None) -> None:
    begun = opening(form.name, tool)
    assert begun is not None
    assert form.render([call_of(form)]).lstrip().startswith(begun)
    assert (tool is None) == ("add" not in begun)


@pytest.mark.parametrize(
    ("name", "source", "rest"),
    [
        ("mistral", MISTRAL_2025, '{"a": 1}'),
        ("deepseek_v3", "", '{"a": 1}<｜tool▁call▁end｜>'),  # noqa: RUF001 (the format's own letters)
        ("gemma", "<start_function_call>", "a:1}<end_function_call>"),
    ],
)
def test_the_template_shows_the_dialect_of_a_named_call(name: str, source: str, rest: str) -> None:
    begun = opening(name, "add", source=source)
    assert begun is not None
    [call] = ToolParser.get(name).parse(begun + rest).calls
    assert call == ToolCall("add", {"a": 1})


def test_a_format_without_a_fixed_opening_cannot_be_forced() -> None:
    assert opening("mistral", "add", source=MISTRAL_WITH_IDS) is None
    assert ToolParser.forced_call(ToolParser.get("hermes"), None, chat_template="") is None


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_the_first_call_is_whole_where_its_end_is_written(form: Format) -> None:
    parser = ToolParser.get(form.name)
    if not parser.first_call_ends:
        assert form.name in SEVERAL_PER_BLOCK
        return
    calls = [call_of(form), ToolCall("other", {})]
    text = form.render(calls)
    end = min(text.index(mark) + len(mark) for mark in parser.first_call_ends if mark in text)
    assert parser.parse(text[:end]).tool_calls == calls[:1]
    assert parser.parse(text[: end - 1]).tool_calls == [] or form.name == "gpt-oss"

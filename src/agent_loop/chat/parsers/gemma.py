"""The Gemma formats: Gemma 4's `<|tool_call>call:name{key:<|"|>text<|"|>,n:1}<tool_call|>`, and FunctionGemma's
`<start_function_call>call:name{key:<escape>text<escape>}<end_function_call>`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from agent_loop.chat.parsers.completion_walker import (
    BlockReader,
    CallBlock,
    ReasoningMarks,
    Tools,
    broken_call,
    skip_space,
)
from agent_loop.chat.parsers.json_calls import JsonFault, decode_json
from agent_loop.chat.parsers.tool_parser import ToolParser
from agent_loop.types import ToolCall

REASONING = ReasoningMarks("<|channel>", "<channel|>", label="thought")


class Dialect(NamedTuple):
    """Texts in which the two formats differ."""

    opening: str
    closing: str
    quote: str


GEMMA_4 = Dialect("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = Dialect("<start_function_call>", "<end_function_call>", "<escape>")


@ToolParser.register("gemma")
class GemmaToolParser(ToolParser):
    """Parser of the Gemma formats. Strings are written between the format's quotes; keys may be quoted. All other
    values are JSON: numbers, `true`, `false`, `null`, lists, nested objects. Python's `None` counts as well, since some
    templates write it. Other bare words are malformed."""

    call_start = GEMMA_4.opening
    call_ends = (GEMMA_4.closing, FUNCTION_GEMMA.closing)
    stream_stops = (GEMMA_4.opening, FUNCTION_GEMMA.opening)
    reasoning_marks = (REASONING,)
    turn_ends = ("<|tool_response>", "<turn|>", "<start_function_response>", "<end_of_turn>", "<eos>")

    def readers(self) -> Mapping[str, BlockReader]:
        return {each.opening: partial(_read_block, dialect=each) for each in (GEMMA_4, FUNCTION_GEMMA)}

    def forced_call(self, name: str | None, *, chat_template: str) -> str | None:
        dialect = GEMMA_4 if GEMMA_4.opening in chat_template else FUNCTION_GEMMA
        return f"{dialect.opening}call:" + ("" if name is None else f"{name}{{")

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        return GEMMA_4.opening in chat_template or FUNCTION_GEMMA.opening in chat_template


def _read_block(text: str, start: int, tools: Tools, *, dialect: Dialect) -> CallBlock:
    try:
        name = _NAME.match(text, start)
        if name is None:
            raise JsonFault(f"{dialect.opening} is not followed by call:name{{...}}")
        written, end = (
            _as_json(text, name.start("brace"), dialect.quote) if name["brace"] else ("{}", name.end())
        )
        end = skip_space(text, end)
        if not text.startswith(dialect.closing, end):
            raise JsonFault(f"the arguments are not followed by {dialect.closing}")
        call = ToolCall(name["name"], decode_json(written))
    except JsonFault as fault:
        if isinstance(fault.__cause__, json.JSONDecodeError):  # its positions are those of the JSON
            fault = JsonFault(f"write the arguments as {{key:{dialect.quote}text{dialect.quote},key:1}}")
        stops = (dialect.opening, REASONING.opening, REASONING.closing)
        return broken_call(text, start, str(fault), closing=dialect.closing, stops=stops)
    return CallBlock((call,), end + len(dialect.closing))


def _as_json(text: str, start: int, quote: str) -> tuple[str, int]:
    """Return the arguments whose bracket is at `start` as JSON, and the position after their last bracket."""
    written: list[str] = []
    depth, position = 0, start
    while token := _TOKENS[quote].match(text, position):
        position = token.end()
        kind, content = token.lastgroup, token[token.lastgroup or 0]
        if kind == "word":
            written.append(_value_as_json(content, quote))
        else:
            written.append(json.dumps(content, ensure_ascii=False) if kind in ("string", "key") else content)
            depth += (kind == "opening") - (kind == "closing")
        if depth == 0:
            return "".join(written), position
    raise JsonFault("the arguments are not closed")


def _value_as_json(word: str, quote: str) -> str:
    word = {"True": "true", "False": "false", "None": "null"}.get(word, word)
    try:
        if isinstance(decode_json(word), str):
            raise JsonFault
    except JsonFault:
        raise JsonFault(f"{word[:40]!r} is not a value; write strings as {quote}text{quote}") from None
    return word


_NAME = re.compile(r"\s*+call:(?P<name>[^\s{}<>|]++)\s*+(?:(?P<brace>\{)|(?:null)?+(?=\s*+<))")
_TOKENS = {
    quote: re.compile(
        rf"\s*+(?:{re.escape(quote)}(?P<string>.*?){re.escape(quote)}|(?P<opening>[\[{{])|(?P<closing>[\]}}])"
        r"|(?P<mark>[,:])|(?P<key>[^\s,:{}\[\]<>|](?:[^,:{}\[\]<>|\n]*[^\s,:{}\[\]<>|])?)(?=\s*:)"
        r"|(?P<word>[^\s,:{}\[\]<>|]++))",
        re.DOTALL,
    )
    for quote in (GEMMA_4.quote, FUNCTION_GEMMA.quote)
}
"""Parts of arguments by the quotes around strings."""

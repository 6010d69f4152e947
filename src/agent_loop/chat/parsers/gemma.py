"""The Gemma formats: Gemma 4's `<|tool_call>call:name{key:<|"|>text<|"|>,n:1}<tool_call|>`, and FunctionGemma's
`<start_function_call>call:name{key:<escape>text<escape>}<end_function_call>`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from agent_loop.chat.parsers.completion_walker import (
    BlockReader,
    CallBlock,
    ReasoningMarks,
    Tools,
    broken_call,
    quoted,
    skip_space,
)
from agent_loop.chat.parsers.json_calls import MAX_DEPTH, JsonFault, decode_json
from agent_loop.chat.parsers.tool_parser import ToolParser
from agent_loop.chat.parsers.untyped_values import PYTHON_WORDS
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
            raise _ValueFault(f"{dialect.opening} is not followed by call:name{{...}}")
        values = _Values(text, start=name.end(), quote=dialect.quote)
        arguments = values.read_object(depth=1) if name["brace"] else {}
        end = skip_space(text, values.position)
        if not text.startswith(dialect.closing, end):
            raise _ValueFault(f"the arguments are not followed by {dialect.closing}")
    except _ValueFault as fault:
        stops = (dialect.opening, REASONING.opening, REASONING.closing)
        return broken_call(text, start, str(fault), closing=dialect.closing, stops=stops)
    return CallBlock((ToolCall(name["name"], arguments),), end + len(dialect.closing))


class _ValueFault(ValueError):
    """Raised if the arguments are invalid. The message is the model's reply."""


class _Values:
    """Parses the values of a text, one after the other."""

    def __init__(self, text: str, *, start: int, quote: str) -> None:
        self.position = start
        self._text = text
        self._quote = quote

    def read_object(self, *, depth: int) -> dict[str, Any]:
        """Return the object whose opening bracket was read."""
        fields: dict[str, Any] = {}
        while not self._closes("}", is_first=not fields):
            key = self._read_key()
            if key in fields:
                raise _ValueFault(f"the key {quoted(key)} is given twice")
            fields[key] = self._read_value(depth=depth)
        return fields

    def _read_list(self, *, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self._closes("]", is_first=not items):
            items.append(self._read_value(depth=depth))
        return items

    def _read_value(self, *, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise _ValueFault(f"the arguments are nested more than {MAX_DEPTH} levels deep")
        if self._takes("{"):
            return self.read_object(depth=depth + 1)
        if self._takes("["):
            return self._read_list(depth=depth + 1)
        if self._takes(self._quote):
            return self._read_string()
        word = self._read(_WORD)
        if not word:
            raise _ValueFault(f"a value is missing before {self._next_characters()!r}")
        try:
            value = PYTHON_WORDS[word] if word in PYTHON_WORDS else decode_json(word)
        except JsonFault:
            value = word
        if isinstance(value, str):
            raise _ValueFault(
                f"{word[:40]!r} is not a value; write strings as {self._quote}text{self._quote}"
            )
        return value

    def _read_key(self) -> str:
        key = self._read_string() if self._takes(self._quote) else self._read(_KEY).strip()
        if not key or not self._takes(":"):
            raise _ValueFault(f"a key and a colon are missing at {self._next_characters()!r}")
        return key

    def _read_string(self) -> str:
        end = self._text.find(self._quote, self.position)
        if end < 0:
            raise _ValueFault(f"a string is not closed with {self._quote}")
        value = self._text[self.position : end]
        self.position = end + len(self._quote)
        return value

    def _closes(self, bracket: str, *, is_first: bool) -> bool:
        if self._takes(bracket):
            return True
        if not is_first and not self._takes(","):
            raise _ValueFault(f"the arguments are not closed: , or {bracket} is missing")
        return False

    def _next_characters(self) -> str:
        return self._text[self.position : self.position + 10]

    def _takes(self, token: str) -> bool:
        start = skip_space(self._text, self.position)
        found = self._text.startswith(token, start)
        if found:
            self.position = start + len(token)
        return found

    def _read(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, skip_space(self._text, self.position))
        if found is None:
            return ""
        self.position = found.end()
        return found[0]


_NAME = re.compile(r"\s*+call:(?P<name>[^\s{}<>|]++)\s*+(?:(?P<brace>\{)|(?:null)?+(?=\s*+<))")
_WORD = re.compile(r"[^\s,:{}\[\]<>|]++")
_KEY = re.compile(r"[^,:{}\[\]<>|\n]++")

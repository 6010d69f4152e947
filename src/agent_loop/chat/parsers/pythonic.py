"""The pythonic formats: `[name(key="value"), other()]`, bare (Llama 4) or between marks (LFM2)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from agent_loop.chat.parsers.completion_walker import (
    THINK,
    BlockReader,
    CallBlock,
    Tools,
    broken_call,
    malformed,
    quoted,
    skip_space,
)
from agent_loop.chat.parsers.json_calls import MAX_DEPTH, JsonFault
from agent_loop.chat.parsers.tool_parser import ToolParser
from agent_loop.chat.parsers.untyped_values import PYTHON_WORDS, decode_python, parameter_schemas, read_value
from agent_loop.types import ToolCall

CLOSES = {"<|tool_call_start|>": "<|tool_call_end|>", "<|python_start|>": "<|python_end|>"}


@ToolParser.register("pythonic")
class PythonicToolParser(ToolParser):
    """Parser of the pythonic formats. Arguments are written as keywords, and values as literals of Python or JSON. A
    list without marks counts as calls if it opens the answer, as the prompt of Llama 4 demands. Quoted values get the
    type of their parameter, since the template of Llama 4 quotes all values."""

    call_start = "<|tool_call_start|>"
    stream_stops = (*CLOSES, "[")
    reasoning_marks = (THINK,)
    turn_ends = ("<|im_end|>", "<|eot|>", "<|eom|>")

    def readers(self) -> Mapping[str, BlockReader]:
        marked = {mark: partial(_read_marked, close=close) for mark, close in CLOSES.items()}
        return {**marked, "[": _read_bare}

    def forced_call(self, name: str | None, *, chat_template: str) -> str | None:
        opening = f"{self.call_start}[" if self.call_start in chat_template else "["
        return opening if name is None else f"{opening}{name}("

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        return cls.call_start in chat_template or "[func_name1(" in chat_template


class _CallFault(ValueError):
    """Raised if a list of calls is invalid. The message is the model's reply."""


def _read_marked(text: str, start: int, tools: Tools, *, close: str) -> CallBlock:
    try:
        begin = skip_space(text, start)
        if not text.startswith("[", begin):
            raise _CallFault("the call is not written as [name(key=value)]")
        calls, end = _read_calls(text, begin + 1, tools=tools)
        end = skip_space(text, end)
        if not text.startswith(close, end):
            raise _CallFault(f"the list of calls is not followed by {close}")
    except _CallFault as fault:
        stops = (*CLOSES, THINK.opening, THINK.closing)
        return broken_call(text, start, str(fault), closing=close, stops=stops)
    return CallBlock(tuple(calls), end + len(close))


def _read_bare(text: str, start: int, tools: Tools) -> CallBlock:
    if not _BEGINNING.match(text, start) or not _opens_answer(text, start - 1):
        return CallBlock((), start, text="[")
    try:
        calls, end = _read_calls(text, start, tools=tools)
    except _CallFault as fault:
        return CallBlock((malformed(text[start - 1 :], str(fault)),), len(text))
    return CallBlock(tuple(calls), end)


def _opens_answer(text: str, position: int) -> bool:
    """Return whether only reasoning and white space come before a position."""
    while position and text[position - 1].isspace():
        position -= 1
    return not position or text.endswith(THINK.closing, 0, position)


def _read_calls(text: str, start: int, *, tools: Tools) -> tuple[list[ToolCall], int]:
    """Return the calls up to the bracket that closes their list, and the position after the bracket."""
    calls: list[ToolCall] = []
    position = start
    while True:
        name = _NAME.match(text, position)
        if name is None:
            raise _CallFault("a call is not written as name(key=value)")
        arguments, position = _read_arguments(text, name.end(), name=name["name"], tools=tools)
        calls.append(ToolCall(name["name"], arguments))
        after = _BETWEEN.match(text, position)
        if after is None:
            raise _CallFault("a call is followed by neither another call nor ]")
        position = after.end()
        if after[0].endswith("]"):
            return calls, position


def _read_arguments(text: str, start: int, *, name: str, tools: Tools) -> tuple[dict[str, Any], int]:
    schemas = parameter_schemas(tools, name=name)
    arguments: dict[str, Any] = {}
    position = skip_space(text, start)
    while not text.startswith(")", position):
        key = _KEY.match(text, position)
        if key is None:
            raise _CallFault(f"an argument of {quoted(name)} is not written as key=value")
        end = _value_end(text, key.end())
        if key["key"] in arguments:
            raise _CallFault(f"the argument {quoted(key['key'])} is given twice")
        arguments[key["key"]] = _value(text[key.end() : end], schema=schemas.get(key["key"]))
        position = skip_space(text, end + 1) if text.startswith(",", end) else end
    return arguments, position + 1


def _value(text: str, *, schema: Any) -> Any:
    text = text.strip()
    try:
        value = PYTHON_WORDS[text] if text in PYTHON_WORDS else decode_python(text)
    except JsonFault as fault:
        raise _CallFault(str(fault)) from fault
    return read_value(value, schema=schema) if isinstance(value, str) and schema else value


def _value_end(text: str, start: int) -> int:
    """Return the position of the comma or bracket after a value."""
    depth, position = 0, start
    while token := _TOKEN.match(text, position):
        first = token[0][0]
        if depth == 0 and first in ",)":
            return position
        if token[0] in CLOSES:
            break
        depth += (first in "[{(") - (first in "]})")
        if depth > MAX_DEPTH:
            break
        position = token.end()
    raise _CallFault("a value or a list of calls is not closed")


_BEGINNING = re.compile(r"\s*+[^\W\d][\w.:/-]*+\s*+\(")
_NAME = re.compile(r"\s*+(?P<name>[^\W\d][\w.:/-]*+)\s*+\(")
_KEY = re.compile(r"(?P<key>[^\W\d][\w-]*+)\s*+=")
_BETWEEN = re.compile(r"\s*+(?:,(?:\s*+\])?+|\])")
_MARKS = "|".join(map(re.escape, CLOSES))
_TOKEN = re.compile(
    rf"""\"(?:[^\"\\]++|\\.)*+\"|'(?:[^'\\]++|\\.)*+'|{_MARKS}|[\[{{(\])}},<]|[^\"'\[\]{{}}(),<]++""",
    re.DOTALL,
)

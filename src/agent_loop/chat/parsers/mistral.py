"""The Mistral formats: `[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}]`, and since 2025
`[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`, the id and `[ARGS]` optional.

Granite 3 writes a list of the same form: `<|tool_call|>[{"name": ..., "arguments": {...}}]`. Granite 4 writes the
Hermes format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agent_loop.chat.parsers.completion_walker import (
    THINK,
    CallBlock,
    CompletionWalker,
    ReasoningMarks,
    find_first,
    malformed,
    skip_space,
)
from agent_loop.chat.parsers.json_calls import (
    JsonBody,
    JsonFault,
    as_call,
    as_json,
    read_arguments,
    scan_json,
)
from agent_loop.chat.parsers.tool_parser import ToolParser
from agent_loop.types import ParsedCompletion

OPEN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
REASONING_MARKS = (ReasoningMarks("[THINK]", "[/THINK]"), THINK)


@ToolParser.register("mistral")
class MistralToolParser(ToolParser):
    """Parser of the Mistral formats. Neither has a closing: a call ends with its JSON. A malformed call with broken
    JSON extends to the next opening. The calls of a list are parsed one by one, so that a malformed call does not
    affect the others."""

    call_start = OPEN
    reasoning_marks = REASONING_MARKS

    def parse(self, text: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCompletion:
        return _WALKER.read(text)

    def forced_call(self, name: str | None, *, chat_template: str) -> str | None:
        if name is None:
            return OPEN
        if ARGUMENTS in chat_template:
            return None if CALL_ID in chat_template else f"{OPEN}{name}{ARGUMENTS}"  # the model writes the id
        return f'{OPEN}[{{"name": {as_json(name)}, "arguments":'

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        return OPEN in chat_template


def _read_calls(text: str, start: int) -> CallBlock:
    begin = skip_space(text, start)
    if header := _HEADER.match(text, begin):
        body = _take_json(text, header.end(), opening="{")
        call = read_arguments(body, name=header["name"], call_id=header["id"] or "")
        return CallBlock((call,), body.end)
    return read_listed_calls(text, begin)


def read_listed_calls(text: str, start: int) -> CallBlock:
    """Return the block of a JSON list of calls."""
    body = _take_json(text, start, opening="[")
    try:
        values = body.decode()
    except JsonFault as fault:
        return CallBlock((malformed(body.text, f"the list of calls is not valid JSON: {fault}"),), body.end)
    if not isinstance(values, list) or not values:
        error = "the opening of calls must be followed by a JSON list of calls"
        return CallBlock((malformed(body.text, error),), body.end)
    calls = [as_call(value, text=body.text) for value in cast(list[Any], values)]
    return CallBlock(tuple(calls), body.end)


def _take_json(text: str, start: int, *, opening: str) -> JsonBody:
    """Return the JSON at `start`, or all text up to the next marker if its brackets do not match."""
    body = scan_json(text, start)
    if body.is_closed and text.startswith(opening, skip_space(text, start)):
        return body
    end, _ = find_first(text, start, _STOPS)
    return JsonBody(text[start:end], end, is_closed=False)


_STOPS = (OPEN, *(mark for thought in REASONING_MARKS for mark in (thought.opening, thought.closing)))
_HEADER = re.compile(
    r"(?P<name>[^\s\[\]{}]++)\s*+(?:\[CALL_ID\]\s*+(?P<id>[^\s\[\]{}]++)\s*+)?(?:\[ARGS\]|(?=\{))"
)
_WALKER = CompletionWalker({OPEN: _read_calls}, reasoning_marks=REASONING_MARKS)


@ToolParser.register("granite")
class GraniteToolParser(ToolParser):
    """Parser of the Granite 3 format. Some models write `<tool_call>`. A call ends with its JSON."""

    call_start = "<|tool_call|>"
    stream_stops = (call_start, "<tool_call>")
    reasoning_marks = (THINK,)

    def parse(self, text: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCompletion:
        return _GRANITE_WALKER.read(text)

    def forced_call(self, name: str | None, *, chat_template: str) -> str | None:
        return f"{self.call_start}[" + ("" if name is None else f'{{"name": {as_json(name)}, "arguments":')

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        return cls.call_start in chat_template and "<|start_of_role|>" in chat_template


_GRANITE_WALKER = CompletionWalker(
    dict.fromkeys(GraniteToolParser.stream_stops, read_listed_calls), ends=("<|end_of_text|>",)
)

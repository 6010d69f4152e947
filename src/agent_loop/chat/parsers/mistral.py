"""The Mistral formats: `[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}]`, and since 2025
`[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`, the id and `[ARGS]` optional.

Granite 3 writes a list of the same form: `<|tool_call|>[{"name": ..., "arguments": {...}}]`. Granite 4 writes the
Hermes format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from agent_loop.chat.parsers.completion_walker import (
    THINK,
    BlockReader,
    CallBlock,
    ReasoningMarks,
    Tools,
    find_first,
    malformed,
    skip_space,
)
from agent_loop.chat.parsers.json_calls import (
    JsonBody,
    JsonFault,
    as_call,
    as_json,
    decode_json,
    read_arguments,
    scan_json,
)
from agent_loop.chat.parsers.tool_parser import ToolParser

OPEN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
REASONING_MARKS = (ReasoningMarks("[THINK]", "[/THINK]"), THINK)


@ToolParser.register("mistral")
class MistralToolParser(ToolParser):
    """Parser of the Mistral formats. Neither has a closing: a call ends with its JSON. A malformed call with broken
    JSON extends to the next opening. The calls of a list are parsed one by one, so that a malformed call does not
    affect the others."""

    call_start = OPEN
    reasoning_marks = REASONING_MARKS
    shown_by = (OPEN,)

    def readers(self) -> Mapping[str, BlockReader]:
        return {OPEN: _read_calls}

    def forced_call(self, name: str | None, *, chat_template: str) -> str | None:
        if name is None:
            return OPEN
        if ARGUMENTS in chat_template:
            return None if CALL_ID in chat_template else f"{OPEN}{name}{ARGUMENTS}"  # the model writes the id
        return f'{OPEN}[{{"name": {as_json(name)}, "arguments":'


def _read_calls(text: str, start: int, tools: Tools) -> CallBlock:
    begin = skip_space(text, start)
    if header := _HEADER.match(text, begin):
        body = _take_json(text, header.end(), opening="{")
        call = read_arguments(body, name=header["name"], call_id=header["id"] or "")
        return CallBlock((call,), body.end)
    return _read_list(text, begin, tools)


def _read_list(text: str, start: int, tools: Tools) -> CallBlock:
    """Return the block of a JSON list of calls."""
    body = _take_json(text, start, opening="[")
    try:
        values = decode_json(body.text)
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


@ToolParser.register("granite")
class GraniteToolParser(ToolParser):
    """Parser of the Granite 3 format. Some models write `<tool_call>`. A call ends with its JSON."""

    call_start = "<|tool_call|>"
    stream_stops = (call_start, "<tool_call>")
    reasoning_marks = (THINK,)
    shown_by = (call_start, "<|start_of_role|>")
    turn_ends = ("<|end_of_text|>",)

    def readers(self) -> Mapping[str, BlockReader]:
        return dict.fromkeys(self.stream_stops, _read_list)

    def forced_call(self, name: str | None, *, chat_template: str) -> str | None:
        return f"{self.call_start}[" + ("" if name is None else f'{{"name": {as_json(name)}, "arguments":')

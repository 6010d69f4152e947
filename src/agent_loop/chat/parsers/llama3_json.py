"""The Llama 3 format: bare `{"name": ..., "parameters": {...}}`, one or several, behind `<|python_tag|>` or not."""

from __future__ import annotations

import re
from collections.abc import Mapping

from agent_loop.chat.parsers.completion_walker import (
    THINK,
    BlockReader,
    CallBlock,
    Tools,
    malformed,
    skip_space,
)
from agent_loop.chat.parsers.json_calls import (
    ARGUMENT_KEYS,
    JsonBody,
    JsonFault,
    as_call,
    as_fields,
    as_json,
    decode_json,
    read_call,
    scan_json,
)
from agent_loop.chat.parsers.tool_parser import ToolParser

PYTHON_TAG = "<|python_tag|>"


@ToolParser.register("llama3_json")
class Llama3JsonToolParser(ToolParser):
    """Parser of the Llama 3 format, which has neither an opening nor a closing. A call is a JSON object with a string
    `name` and `parameters` (or `arguments`), itself or under `function`, that is not inside another object. The name of
    a tool is enough. Text that begins like a call and cannot be parsed is malformed if it mentions parameters or opens
    the completion. Otherwise the text is content."""

    call_start = PYTHON_TAG
    stream_stops = ("{", PYTHON_TAG)
    reasoning_marks = (THINK,)
    shown_by = ('"parameters": ', "ipython")
    turn_ends = ("<|eot_id|>", "<|eom_id|>")

    def readers(self) -> Mapping[str, BlockReader]:
        return {"{": _read_object, PYTHON_TAG: _read_tagged}

    def forced_call(self, name: str | None, *, chat_template: str) -> str | None:
        return '{"name":' if name is None else f'{{"name": {as_json(name)}, "parameters":'


def _read_object(text: str, start: int, tools: Tools) -> CallBlock:
    begin = start - 1
    body = scan_json(text, begin)
    if not body.is_closed:
        return _read_broken(text, begin, reached=body.end)
    try:
        value = decode_json(body.text)
    except JsonFault:
        is_meant = _BEGINNING.match(body.text) and _PARAMETERS.search(body.text)
        return _call_block(body, text=text) if is_meant else CallBlock((), body.end, text=body.text)
    fields = as_fields(value)
    fields = as_fields(fields.get("function")) or fields
    name = fields.get("name")
    names = [tool.get("function", tool).get("name") for tool in tools]
    if not isinstance(name, str) or not (fields.keys() & ARGUMENT_KEYS or name in names):
        return CallBlock((), body.end, text=body.text)
    call = as_call(value, text=body.text)
    return CallBlock((call,), _behind_separator(text, body.end))


def _read_broken(text: str, begin: int, *, reached: int) -> CallBlock:
    """Return the block of an object whose brackets do not match. If the object is meant as a call, the block extends to
    the next call on a line of its own, so that no part of the object is parsed as a call."""
    if not _BEGINNING.match(text, begin):
        return CallBlock((), reached, text=text[begin:reached])
    end = _start_of(_ANY_CALL, text, reached)
    opens_completion = skip_space(text, 0) == begin
    if not opens_completion and not _PARAMETERS.search(text, begin, end):
        return CallBlock((), end, text=text[begin:end])
    end = _start_of(_NEXT_CALL, text, reached)
    return _call_block(JsonBody(text[begin:end], end, is_closed=False), text=text)


def _read_tagged(text: str, start: int, tools: Tools) -> CallBlock:
    begin = skip_space(text, start)
    if _BEGINNING.match(text, begin):
        return CallBlock((), begin)
    end = _start_of(_NEXT_CALL, text, start)
    error = f'{PYTHON_TAG} is not followed by a JSON object with "name" and "parameters"'
    return CallBlock((malformed(text[start:end], error),), end)


def _call_block(body: JsonBody, *, text: str) -> CallBlock:
    call = read_call(body)
    return CallBlock((call,), _behind_separator(text, body.end))


def _behind_separator(text: str, end: int) -> int:
    """Return the position after a call and after a semicolon that separates calls."""
    separator = _SEPARATOR.match(text, end)
    return separator.end() if separator else end


def _start_of(pattern: re.Pattern[str], text: str, start: int) -> int:
    found = pattern.search(text, start)
    return found.start() if found else len(text)


_STOPS = (PYTHON_TAG, THINK.opening, THINK.closing)
_BEGINNING = re.compile(r"\{\s*+[\"'](?:name|type)[\"']\s*+:")
_OR_STOP = "|" + "|".join(map(re.escape, _STOPS))
_ANY_CALL = re.compile(_BEGINNING.pattern + _OR_STOP)
_NEXT_CALL = re.compile(r"(?<=[;\n])[ \t]*+" + _BEGINNING.pattern + _OR_STOP)
_PARAMETERS = re.compile(r"[\"'](?:parameters|arguments)[\"']\s*+:")
_SEPARATOR = re.compile(r"\s*+;\s*+")

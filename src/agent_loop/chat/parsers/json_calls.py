"""Parsing of calls that are written as JSON: strict decoding, with errors for the model.

JSON is decoded by RFC 8259, and strings may hold raw line breaks. Errors are: single quotes, trailing commas, comments,
`NaN` and `Infinity`, numbers too large for a float, lone surrogates, a key that is given twice, and nesting deeper than
`MAX_DEPTH`, which tools and validators could not walk.

In all formats, arguments may be under `arguments` or `parameters`, and may be JSON in a string. Arguments that are
missing, `null` or empty are `{}`.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, cast

from msgspec import Struct

from agent_loop.chat.parsers.completion_walker import find_first, malformed, quoted, shortened, skip_space
from agent_loop.types import MalformedCall, ToolCall

MAX_DEPTH = 100
"""Maximum nesting of arguments."""
ARGUMENT_KEYS = ("arguments", "parameters")
"""Keys of the arguments in a call that is a JSON object."""


class JsonFault(ValueError):
    """Raised if text is not valid JSON. The message is the model's reply."""


class JsonBody(Struct, frozen=True):
    """Text between the opening and the closing of a call."""

    text: str
    end: int
    """Position after the closing, or the end of a body without a closing."""
    is_closed: bool


def decode_json(text: str) -> Any:
    """Return the JSON value of a text."""
    try:
        value, end = _DECODER.raw_decode(text, len(text) - len(text.lstrip(_SPACE)))
    except json.JSONDecodeError as error:
        if error.doc[error.pos : error.pos + 1] == "'":
            fault = f"write keys and strings in double quotes, not single ones (character {error.pos})"
            raise JsonFault(fault) from error
        raise JsonFault(str(error)) from error
    except RecursionError as error:
        raise JsonFault(f"it is nested more than {MAX_DEPTH} levels deep") from error
    except JsonFault:
        raise
    except ValueError as error:
        raise JsonFault("a number in it has too many digits") from error
    if text[end:].strip(_SPACE):
        raise JsonFault("there is more text after the first value; write one call at a time")
    if text.count("[") + text.count("{") > MAX_DEPTH and is_too_deep(value):
        raise JsonFault(f"it is nested more than {MAX_DEPTH} levels deep")
    if _SURROGATE.search(text) and not _is_encodable(value):
        raise JsonFault("a string in it holds half of a surrogate pair")
    return value


def as_json(name: str) -> str:
    """Return the name of a tool as a JSON string."""
    return json.dumps(name, ensure_ascii=False)


def parse_json_call(text: str) -> ToolCall | MalformedCall:
    """Return the call that a text of `{"name": ..., "arguments": {...}}` holds."""
    return read_call(JsonBody(text, len(text), is_closed=True))


def read_call(body: JsonBody) -> ToolCall | MalformedCall:
    """Return the call of a JSON object such as `{"name": ..., "arguments": {...}}`."""
    try:
        value = decode_json(body.text)
    except JsonFault as fault:
        return malformed(body.text, f"the call is not valid JSON: {fault}")
    return as_call(value, text=body.text)


def as_call(value: Any, *, text: str) -> ToolCall | MalformedCall:
    """Return the call of a decoded value: `{"name": ..., "arguments": {...}}`, or the same under `function`."""
    fields = as_fields(value)
    call_id = fields.get("id")
    if "name" not in fields and "function" in fields:
        fields = as_fields(fields["function"])
        call_id = fields.get("id", call_id)
    if not fields:
        return malformed(text, 'the call must be a JSON object with "name" and "arguments"')
    name = fields.get("name")
    if not isinstance(name, str) or not name:
        return malformed(text, 'the call has no "name", or it is not a string')
    key = next(filter(fields.__contains__, ARGUMENT_KEYS), None)
    if key is None and not fields.keys() <= {"name", "id", "type"}:
        return malformed(text, 'the call has no "arguments"')
    return _as_call(
        fields[key] if key else {},
        text=text,
        name=name,
        call_id=call_id if isinstance(call_id, str) else "",
        what=f'"{key}"',
    )


def as_fields(value: Any) -> dict[str, Any]:
    """Return a JSON object, or an empty one for any other value."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def read_arguments(body: JsonBody, *, name: str, call_id: str = "") -> ToolCall | MalformedCall:
    """Return the call of a tool with this name, whose arguments are a JSON object. A closed empty body is `{}`."""
    if not name:
        return malformed(body.text, "the call does not name a tool")
    try:
        value = None if body.is_closed and not body.text.strip() else decode_json(body.text)
    except JsonFault as fault:
        return malformed(body.text, f"the arguments of {quoted(name)} are not valid JSON: {fault}")
    return _as_call(value, text=body.text, name=name, call_id=call_id, what="the arguments")


def read_body(text: str, start: int, *, closings: tuple[str, ...], stops: tuple[str, ...]) -> JsonBody:
    """Return the text before one of `closings`.

    The strings of a JSON value at `start` may contain a closing. Other text ends at the first closing. Text without a
    closing ends before the first of `stops`.
    """
    scanned = scan_json(text, start)
    after = skip_space(text, scanned.end)
    for closing in closings if scanned.is_closed else ():
        if text.startswith(closing, after):
            return JsonBody(scanned.text, after + len(closing), is_closed=True)
    end, marker = find_first(text, start, closings + stops)
    is_closed = marker in closings
    return JsonBody(text[start:end], end + len(marker) * is_closed, is_closed)


def scan_json(text: str, start: int) -> JsonBody:
    """Return the text from `start`, or from the bracket after white space there, up to the matching bracket.

    Brackets in strings do not count. Without a match, the text ends where no match is possible any more. Closed text
    need not be valid JSON.
    """
    depth = 0
    position = skip_space(text, start)
    while token := _TOKEN.match(text, position):
        first = token[0][0]
        if first in "[{":
            depth += 1
        if not 0 < depth <= MAX_DEPTH:
            break
        position = token.end()
        if first in "]}":
            depth -= 1
            if not depth:
                return JsonBody(text[start:position], position, is_closed=True)
    return JsonBody(text[start:position], position, is_closed=False)


_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"|[\[{\]}]|[\s,:+\-.0-9Eaeflnrstu]++', re.DOTALL)
_SPACE = " \t\n\r"
"""White space of JSON."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _as_call(arguments: Any, *, text: str, name: str, call_id: str, what: str) -> ToolCall | MalformedCall:
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = decode_json(arguments)
        except JsonFault as fault:
            return malformed(text, f"{what} must be a JSON object; the string is not valid JSON: {fault}")
    if arguments is None or arguments == "":
        arguments = {}
    if not isinstance(arguments, dict):
        return malformed(text, f"{what} must be a JSON object")
    return ToolCall(name, cast(dict[str, Any], arguments), call_id)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise JsonFault(f"the key {json.dumps(shortened(key))} is given twice")
            seen.add(key)
    return fields


def _refuse_constant(constant: str) -> Any:
    raise JsonFault(f"{constant} is not a JSON value")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise JsonFault(f"the number {digits[:40]} is too large")
    return number


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite, strict=False
)


def is_too_deep(value: Any) -> bool:
    """Return whether a value is nested deeper than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level for inner in _children(outer)]
        if not level:
            return False
    return True


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(cast(dict[str, Any], value).values())
    return cast(list[Any], value) if isinstance(value, list) else []


def _is_encodable(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True

"""Calls written as JSON: strict decoding, and sentences that say what is wrong.

JSON is read as RFC 8259 has it. Single quotes, trailing commas, comments, raw line breaks in strings, `NaN` and
`Infinity`, numbers too large for a float, and half surrogates are faults. A key that is given twice is one too: which
of the two was meant is a guess. So is nesting deeper than `MAX_DEPTH`, which tools and validators could not walk.
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
"""How deep arguments may be nested."""


class JsonFault(ValueError):
    """Text is not the JSON it should be; the message says why, to the model."""


class JsonBody(Struct, frozen=True):
    """What stands between the opening and the closing of a call."""

    text: str
    end: int
    """Behind the closing, or where the body stops without one."""
    is_closed: bool
    value: Any = None
    """What the text holds, where it was decoded already."""

    def decode(self) -> Any:
        """The value that the text holds.

        Raises:
            JsonFault: It holds none, more than one, or one that is refused (see above).
        """
        return decode_json(self.text) if self.value is None else self.value


def decode_json(text: str) -> Any:
    """The value that a text holds.

    Raises:
        JsonFault: It holds none, more than one, or one that is refused (see above).
    """
    try:
        value, end = _DECODER.raw_decode(text, len(text) - len(text.lstrip(_SPACE)))
    except json.JSONDecodeError as error:
        raise JsonFault(_describe(error)) from error
    except RecursionError as error:
        raise JsonFault(f"it is nested more than {MAX_DEPTH} levels deep") from error
    except JsonFault:
        raise
    except ValueError as error:
        raise JsonFault("a number in it has too many digits") from error
    if text[end:].strip(_SPACE):
        raise JsonFault("there is more behind the first value; write one call at a time")
    if text.count("[") + text.count("{") > MAX_DEPTH and is_too_deep(value):
        raise JsonFault(f"it is nested more than {MAX_DEPTH} levels deep")
    if _SURROGATE.search(text) and not _is_encodable(value):
        raise JsonFault("a string in it holds half of a surrogate pair")
    return value


def parse_json_call(text: str) -> ToolCall | MalformedCall:
    """Return the call that a text of `{"name": ..., "arguments": {...}}` holds."""
    return read_call(JsonBody(text, len(text), is_closed=True))


def read_call(
    body: JsonBody, *, keys: tuple[str, ...] = ("arguments",), accepts_text: bool = False
) -> ToolCall | MalformedCall:
    """The call that a JSON object like `{"name": ..., "arguments": {...}}` holds.

    Args:
        body: The JSON.
        keys: Under which the arguments may stand.
        accepts_text: Whether arguments may be a string that holds a JSON object.
    """
    try:
        value = body.decode()
    except JsonFault as fault:
        return malformed(body.text, f"the call is not valid JSON: {fault}")
    return as_call(value, text=body.text, keys=keys, accepts_text=accepts_text)


def as_call(value: Any, *, text: str, keys: tuple[str, ...], accepts_text: bool) -> ToolCall | MalformedCall:
    """Like `read_call`, for a value that is decoded already; `text` is what a malformed call quotes."""
    if not isinstance(value, dict):
        return malformed(text, f'the call must be a JSON object with "name" and "{keys[0]}"')
    fields = cast(dict[str, Any], value)
    name, call_id = fields.get("name"), fields.get("id")
    if not isinstance(name, str) or not name:
        return malformed(text, 'the call has no "name", or it is not a string')
    key = next(filter(fields.__contains__, keys), None)
    if key is None and not fields.keys() <= {"name", "id", "type"}:
        return malformed(text, f'the call has no "{keys[0]}"')
    arguments: Any = fields[key] if key else {}
    return _as_call(
        arguments,
        text=text,
        name=name,
        call_id=call_id if isinstance(call_id, str) else "",
        accepts_text=accepts_text,
        what=f'"{key}"',
    )


def read_arguments(
    body: JsonBody, *, name: str, call_id: str = "", accepts_text: bool = False
) -> ToolCall | MalformedCall:
    """The call of a tool whose name stands elsewhere and whose arguments are a JSON object."""
    if not name:
        return malformed(body.text, "the call does not name a tool")
    try:
        value = body.decode()
    except JsonFault as fault:
        return malformed(body.text, f"the arguments of {quoted(name)} are not valid JSON: {fault}")
    return _as_call(
        value, text=body.text, name=name, call_id=call_id, accepts_text=accepts_text, what="the arguments"
    )


def read_body(text: str, start: int, *, closings: tuple[str, ...], stops: tuple[str, ...]) -> JsonBody:
    """What stands before one of `closings`.

    A JSON value at `start` is passed as a whole, so that its strings may hold anything. What is no JSON ends at the
    first closing; what is not closed, before the first of `stops`.
    """
    end, marker = find_first(text, start, closings + stops)
    is_closed = marker in closings
    body = text[start:end]
    value = _decoded(body) if is_closed else None
    if value is not None:
        return JsonBody(body, end + len(marker), is_closed, value)
    scanned = scan_json(text, start)  # (the closing may stand in a string)
    after = skip_space(text, scanned.end)
    for closing in closings if scanned.is_closed else ():
        if text.startswith(closing, after):
            return JsonBody(scanned.text, after + len(closing), is_closed=True)
    return JsonBody(body, end + len(marker) if is_closed else end, is_closed)


def scan_json(text: str, start: int) -> JsonBody:
    """What stands at `start`, behind white space or not, up to where the brackets that open there are closed again,
    brackets in strings aside; else up to where that is found to be hopeless. What is closed need not be JSON."""
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
"""Of JSON."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _decoded(text: str) -> Any:
    """The value that a text holds; None where it cannot be read."""
    try:
        return decode_json(text)
    except JsonFault:
        return None


def _as_call(
    arguments: Any, *, text: str, name: str, call_id: str, accepts_text: bool, what: str
) -> ToolCall | MalformedCall:
    if accepts_text and isinstance(arguments, str):
        try:
            arguments = decode_json(arguments)
        except JsonFault as fault:
            return malformed(text, f"{what} must be a JSON object; the string holds no valid JSON: {fault}")
    if not isinstance(arguments, dict):
        return malformed(text, f"{what} must be a JSON object")
    return ToolCall(name, cast(dict[str, Any], arguments), call_id)


def _describe(error: json.JSONDecodeError) -> str:
    if error.doc[error.pos : error.pos + 1] == "'":
        return f"write keys and strings in double quotes, not single ones (character {error.pos})"
    return str(error)


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
    raise JsonFault(f"{constant} is no JSON value")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise JsonFault(f"the number {digits[:40]} is too large")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)


def is_too_deep(value: Any) -> bool:
    """Whether a value is nested deeper than `MAX_DEPTH`."""
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

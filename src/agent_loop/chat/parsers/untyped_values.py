"""Types of arguments in formats that write strings without quotes.

With the tool's schema, a value gets the type of its parameter: text that is valid for a type other than string has that
type, and all other text is a string, so that `123` is a string if the parameter is one. Without a schema, JSON that is
not a string is decoded, and all other text is a string. Chat templates write `True`, `False` and `None`, which count as
JSON, as do Python's lists and dicts where the schema says array or object. A value that fits no type of the schema is a
string; the tool session validates arguments.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from msgspec import structs

from agent_loop.chat.parsers.completion_walker import shortened
from agent_loop.chat.parsers.json_calls import JsonFault, decode_json, is_too_deep
from agent_loop.files.plain_values import without_references
from agent_loop.types import ParsedCompletion, ToolCall

PYTHON_WORDS = {"True": True, "False": False, "None": None}
JSON_WORDS = {"true": True, "false": False, "null": None}
_ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*+\\(?![\\'\"abfnrtvxuUN0-7])|[\n\r]")
_STRING = re.compile(r"\"(?:[^\"\\]++|\\.)*+\"|'(?:[^'\\]++|\\.)*+'", re.DOTALL)


def parameter_schemas(tools: Sequence[Mapping[str, Any]], *, name: str) -> Mapping[str, Any]:
    """Return the JSON schemas of a tool's parameters with references resolved; empty if the tool is unknown."""
    for tool_name, parameters in map(_named_parameters, tools):
        if tool_name == name:
            return _mapping(without_references(parameters).get("properties"))
    return {}


def read_value(text: str, *, schema: Any = None) -> Any:
    """Return the value of a text."""
    types = _types(schema)
    if types == frozenset({"string"}) or text in _list(_mapping(schema).get("enum")):
        return text
    try:
        value = PYTHON_WORDS[text.strip()] if text.strip() in PYTHON_WORDS else decode_json(text)
    except JsonFault:
        if not types & {"array", "object"}:
            return text
        try:
            value = decode_python(text)
        except JsonFault:
            return text
    fits = bool(types & _types_of(value)) if types else not isinstance(value, str)
    return with_integers(value, schema) if fits else text


def decode_python(text: str) -> Any:
    """Return the value of a Python literal. `true`, `false` and `null` are read too."""
    escaped = _STRING.sub(lambda found: _ESCAPED.sub(_as_escape, found[0]), text.strip())
    try:
        value = _literal(ast.parse(escaped, mode="eval").body)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise JsonFault(f"{shortened(text.strip())} is not a literal of Python or JSON") from error
    if is_too_deep(value):
        raise JsonFault("it is nested too deep")
    return value


def _as_escape(found: re.Match[str]) -> str:
    """Return a raw line break, or a backslash that begins no escape of Python, as an escape."""
    return {"\n": "\\n", "\r": "\\r"}.get(found[0], found[0] + "\\")


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str()):
            return node.value
        case ast.Name(id=word) if word in JSON_WORDS:
            return JSON_WORDS[word]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [_literal(key) for key in keys if key is not None]
            if len(names) == len(values) and all(isinstance(name, str) for name in names):
                return dict(zip(names, map(_literal, values), strict=True))
        case _:
            pass
    raise ValueError(type(node).__name__)


def with_integers(value: Any, schema: Any) -> Any:
    """Return a value in which whole floats such as `3.0` are integers where the schema says integer."""
    if isinstance(value, float):
        types = _types(schema)
        return int(value) if value.is_integer() and "integer" in types and "number" not in types else value
    if isinstance(value, list):
        items = _mapping(schema).get("items")
        return [with_integers(item, items) for item in cast(list[Any], value)]
    if isinstance(value, dict):
        properties = _mapping(_mapping(schema).get("properties"))
        return {
            key: with_integers(inner, properties.get(key))
            for key, inner in cast(dict[str, Any], value).items()
        }
    return value


def with_integer_arguments(
    parsed: ParsedCompletion, *, tools: Sequence[Mapping[str, Any]]
) -> ParsedCompletion:
    """Return a completion whose calls have integers where the schemas of the tools say integer."""
    if not tools or not parsed.calls:
        return parsed
    schemas = dict(map(_named_parameters, tools))
    calls = [
        structs.replace(call, arguments=with_integers(call.arguments, without_references(schema)))
        if isinstance(call, ToolCall) and (schema := schemas.get(call.name))
        else call
        for call in parsed.calls
    ]
    return structs.replace(parsed, calls=tuple(calls))


def _named_parameters(tool: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    function = _mapping(tool.get("function", tool))
    return function.get("name"), _mapping(function.get("parameters"))


def _types(schema: Any) -> frozenset[str]:
    """Return the JSON types that a schema allows; empty if the schema does not state any."""
    fields = _mapping(schema)
    if "enum" in fields or "const" in fields:
        values = _list(fields.get("enum")) or [fields.get("const")]
        return frozenset(name for value in values for name in _types_of(value))
    for key in ("anyOf", "oneOf"):
        if key in fields:
            options = [_types(option) for option in _list(fields[key])]
            if not all(options):
                return frozenset()
            return frozenset(name for option in options for name in option)
    declared = fields.get("type")
    if declared is None and "allOf" in fields:
        stated = [types for types in map(_types, _list(fields["allOf"])) if types]
        return frozenset[str].intersection(*stated) if stated else frozenset()
    return frozenset(str(name) for name in ([declared] if isinstance(declared, str) else _list(declared)))


def _types_of(value: Any) -> frozenset[str]:
    if isinstance(value, float):
        return frozenset(("integer", "number") if value.is_integer() else ("number",))
    return next((names for kind, names in _JSON_TYPES if isinstance(value, kind)), frozenset({"object"}))


_JSON_TYPES: Sequence[tuple[type, frozenset[str]]] = (
    (type(None), frozenset({"null"})),
    (bool, frozenset({"boolean"})),
    (int, frozenset({"integer", "number"})),
    (str, frozenset({"string"})),
    (list, frozenset({"array"})),
)


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return list(cast(Sequence[Any], value)) if isinstance(value, (list, tuple)) else []

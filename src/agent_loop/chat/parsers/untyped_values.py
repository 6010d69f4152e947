"""Types of arguments in formats that write strings without quotes.

With the tool's schema, a value gets the type of its parameter: text that is valid for a type other than string has that
type, and all other text is a string, so that `123` is a string if the parameter is one. Without a schema, JSON that is
not a string is decoded, and all other text is a string. `True`, `False` and `None` count as JSON, since chat templates
write them. A value that fits no type of the schema is a string; the tool session validates arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from agent_loop.chat.parsers.json_calls import JsonFault, decode_json

PYTHON_WORDS = {"True": True, "False": False, "None": None}


def parameter_schemas(tools: Sequence[Mapping[str, Any]], *, name: str) -> Mapping[str, Any]:
    """Return the JSON schemas of a tool's parameters with references resolved; empty if the tool is unknown."""
    for tool in tools:
        function = _mapping(tool.get("function", tool))
        if function.get("name") == name:
            parameters = _mapping(function.get("parameters"))
            properties = _mapping(parameters.get("properties"))
            return {key: _resolved(schema, parameters) for key, schema in properties.items()}
    return {}


def read_value(text: str, *, schema: Any = None) -> Any:
    """Return the value of a text.

    Args:
        text: The value as the model wrote it.
        schema: JSON schema of the parameter, or None.
    """
    types = _types(schema)
    if types == frozenset({"string"}) or text in _list(_mapping(schema).get("enum")):
        return text
    try:
        value = PYTHON_WORDS[text.strip()] if text.strip() in PYTHON_WORDS else decode_json(text)
    except JsonFault:
        return text
    fits = bool(types & _types_of(value)) if types else not isinstance(value, str)
    return value if fits else text


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return a schema with its own references resolved, but not the references of referenced definitions."""
    changed = dict(_mapping(_pointed_at(schema, root)))
    for key in ("anyOf", "oneOf", "allOf"):
        if key in changed:
            changed[key] = [_pointed_at(option, root) for option in _list(changed[key])]
    return changed


def _pointed_at(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema that a reference such as `#/$defs/Colour` points at, or any other schema unchanged."""
    reference = _mapping(schema).get("$ref")
    if not isinstance(reference, str):
        return schema
    found: Any = root
    for key in reference.removeprefix("#/").split("/"):
        found = _mapping(found).get(key)
    return found


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
    match value:
        case None:
            names = ("null",)
        case bool():
            names = ("boolean",)
        case int():
            names = ("integer", "number")
        case float():
            names = ("integer", "number") if value.is_integer() else ("number",)
        case str():
            names = ("string",)
        case list():
            names = ("array",)
        case _:
            names = ("object",)
    return frozenset(names)


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return list(cast(Sequence[Any], value)) if isinstance(value, (list, tuple)) else []

"""Conversion of the arguments of calls to the types of a tool's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any, cast


def coerce_arguments(tool_schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments, those of another type than the schema's converted if the value stays the same.

    Text is read as JSON (`"3"` is 3, `"true"` is True, `"[1]"` is a list), numbers and booleans become text, and a
    whole number such as 3.0 becomes an integer. Items of arrays and fields of objects are converted too. Whatever
    cannot be converted is returned unchanged.
    """
    return _coerced_fields(arguments, tool_schema["function"].get("parameters") or {})


def _coerced_fields(fields: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    properties: Mapping[str, Any] = schema.get("properties") or {}
    return {name: _coerced(value, properties.get(name)) for name, value in fields.items()}


def _coerced(value: Any, schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return value
    schema = cast(Mapping[str, Any], schema)
    types = _types(schema)
    if types and not any(_has_type(value, name) for name in types):
        value = next((other for name in types for other in _conversions(value, name)), value)
    if isinstance(value, float) and "integer" in types and "number" not in types and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return _coerced_fields(cast(dict[str, Any], value), schema)
    if isinstance(value, list):
        return [_coerced(item, schema.get("items")) for item in cast(list[Any], value)]
    return value


def _types(schema: Mapping[str, Any]) -> list[str]:
    """Return the types that a schema allows, with those of its options. No types if it does not state them."""
    types: Any = schema.get("type")
    if types is not None:
        return [types] if isinstance(types, str) else list(types)
    options: list[Any] = schema.get("anyOf") or schema.get("oneOf") or []
    return [name for option in options if isinstance(option, Mapping) for name in _types(cast(Any, option))]


def _has_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if isinstance(value, float) and value.is_integer() and name == "integer":
        return True
    return isinstance(value, _PYTHON_TYPES.get(name, object))


def _conversions(value: Any, name: str) -> list[Any]:
    """Return the value as a value of the type, in a list that is empty if that is not possible."""
    if name == "string":
        return [json.dumps(value)] if isinstance(value, bool | int | float) else []
    if not isinstance(value, str):
        return []
    try:
        read = json.loads(value.lower() if name == "boolean" else value)
    except (ValueError, RecursionError):
        return []
    if isinstance(read, float) and not isfinite(read):
        return []
    return [read] if _has_type(read, name) else []


_PYTHON_TYPES: Mapping[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}

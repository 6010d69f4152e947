"""Validation of tool schemas, and conversion and validation of the arguments of calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any, Literal, cast

from jsonschema.exceptions import ValidationError
from pydantic import Field

from agent_loop.config import Section, parse_section
from agent_loop.errors import ConfigError, did_you_mean
from agent_loop.runtime.describe import one_line
from agent_loop.tools.json_schema import InvalidSchema, SchemaValidator, check_json_schema

MAX_ERRORS = 3
"""Maximum number of errors of one call that are reported to the model."""
MAX_MESSAGE_CHARACTERS = 400
"""Maximum length of the text of one error, which may quote the argument and the schema."""


class _FunctionSchema(Section):
    name: str = Field(pattern=r"^\S+$")
    description: str = ""
    parameters: dict[str, Any] = Field(default={})
    strict: bool | None = None


class _ToolSchema(Section):
    type: Literal["function"] = "function"
    function: _FunctionSchema


def check_tool_schema(tool_schema: Mapping[str, Any], *, where: str) -> None:
    """Check that a schema is an OpenAI function schema and that its parameters are a JSON schema."""
    function = parse_section(_ToolSchema, tool_schema, where=where).function
    where = f"{where}: function.parameters of {function.name!r}"
    try:
        check_json_schema(function.parameters)
    except InvalidSchema as error:
        raise ConfigError(f"{where} is not a valid JSON schema: {error}") from error
    if function.parameters.get("type", "object") != "object":
        raise ConfigError(f"{where} has the type {function.parameters['type']!r}; make it 'object'")
    properties: dict[str, Any] = function.parameters.get("properties", {})
    for name in function.parameters.get("required", []):
        if name not in properties:
            raise ConfigError(
                f"{where} requires {name!r}, which is not a property{did_you_mean(name, properties)}"
            )


_OPENERS = (
    "additionalProperties",
    "patternProperties",
    "allOf",
    "anyOf",
    "oneOf",
    "$ref",
    "unevaluatedProperties",
)
"""Keywords that state which arguments are allowed besides `properties`."""


class ArgumentsCheck:
    """Validator of the arguments of calls of one tool.

    An argument that the schema does not define is an error, unless the schema states what else is allowed.
    """

    def __init__(self, tool_schema: Mapping[str, Any]) -> None:
        parameters: dict[str, Any] = dict(tool_schema["function"].get("parameters") or {})
        schema = {"type": "object", **parameters}
        if "properties" in parameters and not any(key in parameters for key in _OPENERS):
            schema["additionalProperties"] = False
        self._validator = SchemaValidator(schema)

    def find_error(self, arguments: Mapping[str, Any]) -> str | None:
        """Return an error message for the model, or None if the arguments are valid."""
        try:
            messages = dict.fromkeys(map(_describe_error, self._validator.find_errors(arguments)))
        except InvalidSchema as error:
            return f"the call cannot be validated against the tool's schema: {error}"
        return "; ".join(list(messages)[:MAX_ERRORS]) or None


def check_arguments(tool_schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """Return what `ArgumentsCheck.find_error` returns, for a schema that is used once."""
    return ArgumentsCheck(tool_schema).find_error(arguments)


def _describe_error(error: ValidationError) -> str:
    if error.validator in ("anyOf", "oneOf"):
        inner = [cause for cause in error.context or () if cause.validator != "type" or cause.relative_path]
        if inner:
            return _describe_error(inner[0])
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.absolute_path)
    what = f"argument {path.removeprefix('.')!r}" if path else "the call"
    schema: Any = error.schema
    instance: Any = error.instance
    if error.validator == "required":
        missing = [repr(name) for name in schema["required"] if name not in instance]
        return f"{what} lacks {', '.join(missing)}"
    if error.validator == "additionalProperties" and "patternProperties" not in schema:
        names = schema.get("properties", {})
        unknown = next(name for name in instance if name not in names)
        return f"{what} has no argument {unknown!r}{did_you_mean(unknown, names)}"
    matches_several = error.validator == "oneOf" and not error.context
    expected = "" if matches_several or error.validator not in _TYPE_KEYWORDS else _describe_expected(schema)
    if not expected:
        return f"{what}: {one_line(error.message, max_length=MAX_MESSAGE_CHARACTERS)}"
    return f"{what} is {_describe_json(instance)}; expected {expected}"


_TYPE_KEYWORDS = ("type", "enum", "const", "anyOf", "oneOf")
_TYPES: Mapping[str, tuple[Any, str]] = {
    "boolean": (bool, "true or false"),
    "integer": (int, "an integer"),
    "number": ((int, float), "a number"),
    "string": (str, "a string"),
    "array": (list, "an array"),
    "object": (dict, "an object"),
    "null": (type(None), "null"),
}
"""Types of JSON schemas: what they are in Python, and in words."""


def _describe_expected(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(option, ensure_ascii=False) for option in schema["enum"])
    if "const" in schema:
        return json.dumps(schema["const"], ensure_ascii=False)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(filter(None, (_describe_expected(option) for option in schema[key])))
    types = schema.get("type", [])
    return " or ".join(_TYPES[name][1] for name in ([types] if isinstance(types, str) else types))


def _describe_json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = text if len(text) <= 60 else text[:57] + "..."
    if value is None:
        return text
    word = next((words for kind, words in _TYPES.values() if isinstance(value, kind)), "an object")
    return f"{text}, {'a boolean' if isinstance(value, bool) else word}"


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
    if isinstance(value, float) and name == "integer":
        return value.is_integer()
    return isinstance(value, _TYPES[name][0])


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

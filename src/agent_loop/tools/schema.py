"""Proves that a schema is one of a tool, and holds the arguments of calls against it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast

from jsonschema.exceptions import ValidationError
from pydantic import Field
from referencing.exceptions import Unresolvable

from agent_loop.config import Section, parse_section
from agent_loop.errors import ConfigError, did_you_mean
from agent_loop.runtime.boundary import one_line
from agent_loop.tools.json_schema import (
    BoundedValidator,
    InvalidSchema,
    TooManySteps,
    check_applicable,
    check_json_schema,
)
from agent_loop.tools.patterns import PatternRefused

MAX_FAULTS = 3
"""So many faults of one call are named to the model."""
MAX_MESSAGE_CHARACTERS = 400
"""Longest text of one fault, in characters. A fault may quote the argument and the schema."""


def check_tool_schema(tool_schema: Mapping[str, Any], *, where: str) -> None:
    """Checks that a schema is an OpenAI function schema and that its parameters are a JSON schema.

    Raises:
        ConfigError: It is not.
    """
    function = parse_section(_ToolSchema, tool_schema, where=where).function
    where = f"{where}: function.parameters of {function.name!r}"
    try:
        check_json_schema(function.parameters)
        check_applicable(function.parameters)
    except InvalidSchema as error:
        raise ConfigError(f"{where} is no valid JSON schema: {error}") from error
    if function.parameters.get("type", "object") != "object":
        raise ConfigError(f"{where} has the type {function.parameters['type']!r}; make it 'object'")
    properties: dict[str, Any] = function.parameters.get("properties", {})
    for name in function.parameters.get("required", []):
        if name not in properties:
            raise ConfigError(
                f"{where} requires {name!r}, which is not a property{did_you_mean(name, properties)}"
            )


class ArgumentsCheck:
    """Holds the arguments of calls against the schema of one tool.

    An argument that the schema does not name is wrong too, unless the schema itself says what else is allowed.
    """

    def __init__(self, tool_schema: Mapping[str, Any]) -> None:
        parameters: dict[str, Any] = dict(tool_schema["function"].get("parameters") or {})
        self._plain_types = _plain_types(parameters)
        self._required = frozenset[str](parameters.get("required", ()))
        schema = {"type": "object", **parameters}
        if "properties" in parameters and not any(key in parameters for key in _OPENERS):
            schema["additionalProperties"] = False
        self._validator = BoundedValidator(schema)

    def fault(self, arguments: Mapping[str, Any]) -> str | None:
        """What is wrong with the arguments of a call, in words for the model; None if they fit."""
        if self._fits_plainly(arguments):
            return None
        try:
            sentences = dict.fromkeys(map(_describe_fault, self._validator.faults(arguments)))
        except OverflowError:
            return "a number in the call is too large"
        except RecursionError:
            return "the call is nested too deeply"
        except TooManySteps:
            return "the call takes too long to be held against the tool's schema; make it shorter"
        except (Unresolvable, PatternRefused) as error:
            return f"the call cannot be held against the tool's schema: {error}"
        return "; ".join(list(sentences)[:MAX_FAULTS]) or None

    def _fits_plainly(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the arguments fit beyond doubt. Most do, and the validator takes ten times as long to say so."""
        types = self._plain_types
        if types is None or not isinstance(arguments, dict):
            return False
        for name, value in arguments.items():
            if types.get(name) is not type(value):
                return False
        return self._required.issubset(arguments)


def check_arguments(tool_schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """As `ArgumentsCheck`, for a schema that is used once."""
    return ArgumentsCheck(tool_schema).fault(arguments)


def _plain_types(parameters: Mapping[str, Any]) -> dict[str, type] | None:
    """The arguments of which the schema says a plain type and no more; None if it says something of all together."""
    if not parameters.keys() <= _PLAIN_KEYWORDS:
        return None
    properties: Mapping[str, Any] = parameters.get("properties", {})
    return {name: _PLAIN_TYPES[schema["type"]] for name, schema in properties.items() if _is_plain(schema)}


def _is_plain(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    keywords = cast(dict[str, Any], schema)
    return keywords.keys() <= _ANNOTATIONS | {"type"} and keywords.get("type") in tuple(_PLAIN_TYPES)


_ANNOTATIONS = frozenset({"title", "description", "default", "examples"})
_PLAIN_KEYWORDS = _ANNOTATIONS | {"type", "properties", "required", "additionalProperties"}
_PLAIN_TYPES: Mapping[str, type] = {"string": str, "integer": int, "number": float, "boolean": bool}


class _FunctionSchema(Section):
    name: str = Field(pattern=r"^\S+$")
    description: str = ""
    parameters: dict[str, Any] = Field(default={})
    strict: bool | None = None


class _ToolSchema(Section):
    type: Literal["function"] = "function"
    function: _FunctionSchema


_OPENERS = (
    "additionalProperties",
    "patternProperties",
    "allOf",
    "anyOf",
    "oneOf",
    "$ref",
    "unevaluatedProperties",
)


def _describe_fault(fault: ValidationError) -> str:
    if fault.validator in ("anyOf", "oneOf"):
        inner = [cause for cause in fault.context or () if cause.validator != "type" or cause.relative_path]
        if inner:
            return _describe_fault(inner[0])
    place = _describe_place(fault.absolute_path)
    schema: Any = fault.schema
    instance: Any = fault.instance
    if fault.validator == "required":
        missing = [repr(name) for name in schema["required"] if name not in instance]
        return f"{place or 'the call'} lacks {', '.join(missing)}"
    if fault.validator == "additionalProperties" and "patternProperties" not in schema:
        names = schema.get("properties", {})
        unknown = next(name for name in instance if name not in names)
        return f"{place or 'the call'} has no argument {unknown!r}{did_you_mean(unknown, names)}"
    fits_several = fault.validator == "oneOf" and not fault.context
    expected = "" if fits_several or fault.validator not in _TYPE_KEYWORDS else _describe_expected(schema)
    if not expected:
        return f"{place or 'the call'}: {one_line(fault.message, max_length=MAX_MESSAGE_CHARACTERS)}"
    return f"{place or 'the call'} is {_describe_json(instance)}; expected {expected}"


_TYPE_KEYWORDS = ("type", "enum", "const", "anyOf", "oneOf")
_TYPE_WORDS = {
    "integer": "an integer",
    "array": "an array",
    "object": "an object",
    "string": "a string",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
}
_VALUE_WORDS: Mapping[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


def _describe_place(path: Iterable[str | int]) -> str:
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in path]
    return f"argument {''.join(steps).removeprefix('.')!r}" if steps else ""


def _describe_expected(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(option, ensure_ascii=False) for option in schema["enum"])
    if "const" in schema:
        return json.dumps(schema["const"], ensure_ascii=False)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(filter(None, (_describe_expected(option) for option in schema[key])))
    types = schema.get("type", [])
    return " or ".join(_TYPE_WORDS[name] for name in ([types] if isinstance(types, str) else types))


def _describe_json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = text if len(text) <= 60 else text[:57] + "..."
    kind = next((word for type_, word in _VALUE_WORDS.items() if isinstance(value, type_)), "")
    return f"{text}, {kind}" if kind else text

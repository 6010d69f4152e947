"""Schemas of functions, built from type hints and Google-style docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind

from agent_loop.errors import ConfigError, did_you_mean
from agent_loop.files.plain_values import without_references
from agent_loop.loading import USER_MODULE


def function_schema(
    function: Callable[..., Any], *, name: str | None = None, description: str | None = None
) -> dict[str, Any]:
    """Return the OpenAI schema of a function, from its type hints and its Google-style docstring."""
    where = _location(function)
    description = description or parse_docstring(inspect.getdoc(function) or "")[0]
    if not description:
        raise ConfigError(f"{where} has no docstring; describe what it does, since the model reads it")
    try:
        schema = arguments_model(function).model_json_schema(schema_generator=_QuietJsonSchema)
    except PydanticUserError as error:
        raise ConfigError(f"{where}: one of its parameters has no JSON form: {error.message}") from error
    tidy = _tidy(without_references(schema))
    parameters = {"type": "object", **{key: tidy[key] for key in ("properties", "required") if key in tidy}}
    name = name or str(getattr(function, "__name__", type(function).__name__))
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def arguments_model(function: Callable[..., Any]) -> type[BaseModel]:
    """Return a pydantic model with one field per parameter, with the parameter's name as its alias."""
    where = _location(function)
    _, described = parse_docstring(inspect.getdoc(function) or "")
    annotated = function if inspect.isroutine(function) else type(function).__call__
    fields: dict[str, Any] = {}
    try:
        hints = get_type_hints(annotated, include_extras=True)
        parameters = inspect.signature(function).parameters
        for name in described:
            if name not in parameters:
                raise ConfigError(
                    f"{where}: its docstring describes {name!r}, which is not a parameter"
                    f"{did_you_mean(name, parameters)}"
                )
        for index, (name, parameter) in enumerate(parameters.items()):
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ConfigError(
                    f"{where} takes {parameter}, but arguments are passed by name; make it a named parameter"
                )
            if name not in hints:
                raise ConfigError(
                    f"{where}: parameter {name!r} has no annotation; give its type, as in {name}: int"
                )
            default = ... if parameter.default is parameter.empty else parameter.default
            text = {"description": described[name]} if described.get(name) else {}
            fields[f"parameter_{index}"] = (hints[name], cast(Any, Field)(default, alias=name, **text))
        return create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)
    except (PydanticUserError, NameError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: its annotations cannot be read: {error}") from error


def _location(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    module = getattr(function, "__module__", "?")
    if module.startswith(USER_MODULE) and hasattr(function, "__code__"):
        return f"tool function {Path(function.__code__.co_filename).name}:{name}"
    return f"tool function {module}.{name}"


class _QuietJsonSchema(GenerateJsonSchema):
    """Schema generator that omits a default without a JSON form, without a warning."""

    ignored_warning_kinds: set[JsonSchemaWarningKind] = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  (the same in pydantic)


_NAMED_SCHEMAS = ("properties", "patternProperties")
_NOISE = ("title", "discriminator")
_VALUES = ("default", "enum", "const", "examples")
_KEY_ORDER = {"type": 0, "description": 2, "default": 3}


def _tidy(node: Any) -> Any:
    """Return the schema without titles and null defaults, which many chat templates cannot handle."""
    if isinstance(node, list):
        return [_tidy(item) for item in cast(list[Any], node)]
    if not isinstance(node, dict):
        return node
    schema = cast(dict[str, Any], node)
    tidy: dict[str, Any] = {}
    for key in sorted(schema, key=lambda key: _KEY_ORDER.get(key, 1)):
        value = schema[key]
        if key in _NOISE or (key == "default" and value is None):
            continue
        if key in _NAMED_SCHEMAS:
            tidy[key] = {name: _tidy(inner) for name, inner in value.items()}
        else:
            tidy[key] = value if key in _VALUES else _tidy(value)
    return tidy


_SECTION = re.compile(
    r"^(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?|Warnings?|See Also|References):$",
    re.MULTILINE,
)
_ARGUMENT = re.compile(r"^\*{0,2}(?P<name>\w+)\s*(\(.*?\))?:", re.MULTILINE)


def parse_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """Return the description before the first section, and the descriptions in the section `Args:` by name."""
    description, *sections = _SECTION.split(inspect.cleandoc(docstring))
    arguments: dict[str, str] = {}
    for title, text in zip(sections[::2], sections[1::2], strict=True):
        if title in ("Args", "Arguments", "Parameters"):
            text = inspect.cleandoc(text)
            entries = [*_ARGUMENT.finditer(text)]
            for entry, following in zip(entries, [*entries[1:], None], strict=True):
                end = len(text) if following is None else following.start()
                arguments[entry["name"]] = " ".join(text[entry.end() : end].split())
    return description.strip(), arguments

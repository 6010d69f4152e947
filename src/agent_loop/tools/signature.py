"""Schemas of functions, built from type hints and Google-style docstrings."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, Required, Union, cast, get_args, get_origin, get_type_hints

import typing_extensions
from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind

from agent_loop.errors import ConfigError, did_you_mean
from agent_loop.files.plain_values import without_references
from agent_loop.loading import USER_MODULE


def function_schema(
    function: Callable[..., Any], *, name: str | None = None, description: str | None = None
) -> dict[str, Any]:
    """Return the OpenAI schema of a function, from its type hints and its Google-style docstring.

    Raises:
        ConfigError: The function has no docstring, or a parameter has no annotation, has a type without a JSON form,
            or cannot be passed by name.
    """
    where = _location(function)
    docstring = parse_docstring(inspect.getdoc(function) or "")
    description = description or docstring.description
    if not description:
        raise ConfigError(f"{where} has no docstring; describe what it does, since the model reads it")
    parameters = _parameters_schema(arguments_model(function), where=where)
    name = name or str(getattr(function, "__name__", type(function).__name__))
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def arguments_model(function: Callable[..., Any]) -> type[BaseModel]:
    """Return a pydantic model with one field per parameter, with the parameter's name as its alias.

    Raises:
        ConfigError: A parameter has no annotation, its annotation cannot be read, or it cannot be passed by name.
    """
    where = _location(function)
    docstring = parse_docstring(inspect.getdoc(function) or "")
    fields: dict[str, Any] = {}
    try:
        hints = get_type_hints(_hinted(function), include_extras=True)
        parameters = inspect.signature(function).parameters
        _check_parameters(parameters.values(), hints=hints, docstring=docstring, where=where)
        for index, (name, parameter) in enumerate(parameters.items()):
            default = ... if parameter.default is parameter.empty else parameter.default
            text = docstring.arguments.get(name)
            described: dict[str, Any] = {"description": text} if text else {}
            fields[f"parameter_{index}"] = (_readable(hints[name]), Field(default, alias=name, **described))
        return create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)
    except (PydanticUserError, NameError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: its annotations cannot be read: {error}") from error


def _location(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    module = getattr(function, "__module__", "?")
    if module.startswith(USER_MODULE) and hasattr(function, "__code__"):
        return f"tool function {Path(function.__code__.co_filename).name}:{name}"
    return f"tool function {module}.{name}"


def _hinted(function: Callable[..., Any]) -> Any:
    """Return what carries the annotations: the function, or the `__call__` of an object."""
    return function if inspect.isroutine(function) else type(function).__call__


def _check_parameters(
    parameters: Iterable[inspect.Parameter], *, hints: Mapping[str, Any], docstring: Docstring, where: str
) -> None:
    parameters = list(parameters)
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(
                f"{where} takes {parameter}; name each parameter, so that the schema can describe it"
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(
                f"{where}: {parameter.name!r} is positional-only; arguments are passed by name, so remove the '/'"
            )
        if parameter.name not in hints:
            raise ConfigError(
                f"{where}: parameter {parameter.name!r} has no annotation; give its type, as in {parameter.name}: int"
            )
    names = [parameter.name for parameter in parameters]
    for name in docstring.arguments:
        if name not in names:
            raise ConfigError(
                f"{where}: its docstring describes {name!r}, which is not a parameter{did_you_mean(name, names)}"
            )


def _readable(hint: Any) -> Any:
    """Return a type hint with the typed dictionaries of `typing` as those of `typing_extensions`.

    Pydantic reads only the latter before Python 3.12.
    """
    if isinstance(hint, _TYPED_DICT):
        items = {name: _readable(value) for name, value in get_type_hints(hint, include_extras=True).items()}
        for name, value in items.items():
            if get_origin(value) not in (Required, NotRequired):
                items[name] = (Required if name in hint.__required_keys__ else NotRequired)[value]
        return cast(Any, typing_extensions.TypedDict)(hint.__name__, items)
    inner = get_args(hint)
    if not inner or get_origin(hint) is Literal:
        return hint
    read = tuple(_readable(value) for value in inner)
    if read == inner:
        return hint
    if isinstance(hint, types.UnionType):
        return Union[read]  # noqa: UP007  (of types that are known only here)
    return hint.copy_with(read) if hasattr(hint, "copy_with") else get_origin(hint)[read]


_TYPED_DICT: Any = type(typing.TypedDict("_TypedDict", {}))


class _QuietJsonSchema(GenerateJsonSchema):
    """Schema generator that omits a default without a JSON form, without a warning."""

    ignored_warning_kinds: set[JsonSchemaWarningKind] = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  (the same in pydantic)


def _parameters_schema(model: type[BaseModel], *, where: str) -> dict[str, Any]:
    try:
        schema = model.model_json_schema(schema_generator=_QuietJsonSchema)
    except PydanticUserError as error:
        raise ConfigError(f"{where}: one of its parameters has no JSON form: {error.message}") from error
    tidy = _tidy(without_references(schema))
    return {"type": "object", "properties": tidy["properties"]} | (
        {"required": tidy["required"]} if "required" in tidy else {}
    )


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
    r"(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?|Warnings?|See Also|References):$"
)
_ARGUMENT_SECTIONS = ("Args", "Arguments", "Parameters")
_ARGUMENT = re.compile(r"\*{0,2}(?P<name>\w+)\s*(\(.*?\))?:\s*(?P<text>.*)$")


@dataclass(frozen=True, slots=True)
class Docstring:
    """Parsed docstring of a function."""

    description: str
    """The text before the first section."""
    arguments: dict[str, str]
    """Descriptions in the section `Args:`, by name."""


def parse_docstring(docstring: str) -> Docstring:
    """Parse the description and the `Args:` section. Other sections are ignored."""
    sections: dict[str, list[str]] = {"": []}
    lines = sections[""]
    for line in inspect.cleandoc(docstring).splitlines():
        header = _SECTION.match(line)
        if header is None:
            lines.append(line)
        else:
            lines = sections.setdefault(header[1], [])
    arguments: dict[str, str] = {}
    for name in _ARGUMENT_SECTIONS:
        arguments |= _parse_arguments(sections.get(name, []))
    return Docstring("\n".join(sections[""]).strip(), arguments)


def _parse_arguments(lines: list[str]) -> dict[str, str]:
    """Parse the entries of a section. An entry starts at the indentation of the first; deeper lines continue it."""
    texts: dict[str, list[str]] = {}
    entry: list[str] = []
    lines = inspect.cleandoc("\n".join(["", *lines])).splitlines()
    for line in lines:
        argument = _ARGUMENT.match(line)
        if argument is not None:
            entry = texts[argument["name"]] = [argument["text"]]
        else:
            entry.append(line.strip())
    return {name: " ".join(" ".join(text).split()) for name, text in texts.items()}

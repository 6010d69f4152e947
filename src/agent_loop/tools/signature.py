"""Schemas of functions, built from type hints and docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind

from agent_loop.errors import ConfigError, did_you_mean
from agent_loop.loading import USER_MODULE
from agent_loop.tools.docstring import Docstring, parse_docstring


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
            fields[f"parameter_{index}"] = (hints[name], Field(default, alias=name, **described))
        return create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)
    except (PydanticUserError, NameError, TypeError, ValueError) as error:
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


class _QuietJsonSchema(GenerateJsonSchema):
    """Schema generator that omits a default without a JSON form, without a warning."""

    ignored_warning_kinds: set[JsonSchemaWarningKind] = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  (the same in pydantic)


def _parameters_schema(model: type[BaseModel], *, where: str) -> dict[str, Any]:
    try:
        schema = model.model_json_schema(schema_generator=_QuietJsonSchema)
    except PydanticUserError as error:
        raise ConfigError(f"{where}: one of its parameters has no JSON form: {error.message}") from error
    definitions = schema.pop("$defs", {})
    tidy = _tidy(schema, definitions=definitions, where=where)
    return {"type": "object", "properties": tidy["properties"]} | (
        {"required": tidy["required"]} if "required" in tidy else {}
    )


_NAMED_SCHEMAS = ("properties", "patternProperties")
_NOISE = ("title", "discriminator")
_VALUES = ("default", "enum", "const", "examples")
_KEY_ORDER = {"type": 0, "description": 2, "default": 3}


def _tidy(node: Any, *, definitions: Mapping[str, Any], where: str, parents: tuple[str, ...] = ()) -> Any:
    """Return the schema without titles and null defaults, and with references resolved.

    Many chat templates cannot handle references, titles or null defaults.
    """
    if isinstance(node, list):
        items = cast(list[Any], node)
        return [_tidy(item, definitions=definitions, where=where, parents=parents) for item in items]
    if not isinstance(node, dict):
        return node
    schema = dict(cast(dict[str, Any], node))
    reference = schema.pop("$ref", None)
    if reference is not None:
        target = str(reference).removeprefix("#/$defs/")
        if target in parents:
            raise ConfigError(
                f"{where}: its parameter type {target!r} contains itself; use a flat type, or JSON text"
            )
        schema = {**definitions[target], **schema}
        parents = (*parents, target)
    tidy: dict[str, Any] = {}
    for key in sorted(schema, key=lambda key: _KEY_ORDER.get(key, 1)):
        value = schema[key]
        if key in _NOISE or (key == "default" and value is None):
            continue
        if key in _NAMED_SCHEMAS:
            tidy[key] = {
                name: _tidy(inner, definitions=definitions, where=where, parents=parents)
                for name, inner in value.items()
            }
        else:
            is_schema = key not in _VALUES
            tidy[key] = (
                _tidy(value, definitions=definitions, where=where, parents=parents) if is_schema else value
            )
    return tidy

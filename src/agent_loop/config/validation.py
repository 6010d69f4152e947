"""Validation of settings, with errors that name the fault and the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from agent_loop.errors import ConfigError, did_you_mean
from agent_loop.files.plain_values import shown

OptionsT = TypeVar("OptionsT")

SectionT = TypeVar("SectionT", bound=BaseModel)


def parse_section(
    section: type[SectionT], values: Mapping[str, Any], *, where: str, names: Mapping[str, str] | None = None
) -> SectionT:
    """Validate a mapping against a section and return the section.

    Args:
        section: The section.
        values: The values.
        where: Start of the error message, such as the name of the file.
        names: The user's name of each setting that was given under another one.

    Raises:
        ConfigError: A key or a value is wrong. The message has one line per fault, with the value and the remedy.
    """
    try:
        return section.model_validate(dict(values))
    except ValidationError as error:
        raise _refusal(error, section, where=where, names=names or {}) from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def parse_options(options: type[OptionsT], values: Mapping[str, Any], *, where: str) -> OptionsT:
    """Validate a mapping against the fields of a dataclass and return the dataclass.

    Args:
        where: Start of the error message, such as the name of the file.
    """
    try:
        return TypeAdapter(options).validate_python(dict(values))
    except ValidationError as error:
        raise _refusal(error, None, where=where, names={}) from None


def parse_value(kind: Any, value: Any, *, key: str) -> Any:
    """Validate the value of a single key against a type, and return it."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{key} is {shown(value)}: {_remedy(error.errors()[0])}") from None


def _refusal(
    error: ValidationError, section: type[BaseModel] | None, *, where: str, names: Mapping[str, str]
) -> ConfigError:
    remedies: dict[str, list[str]] = {}
    for fault in error.errors():
        message, remedy = _explain(fault, section or BaseModel, names)
        remedies.setdefault(message, []).append(remedy)  # a union has a remedy for each of its types
    lines = [message + ", or ".join(filter(None, found)) for message, found in remedies.items()]
    return ConfigError(f"{where}: " + "\n".join(lines))


def _explain(fault: ErrorDetails, section: type[BaseModel], names: Mapping[str, str]) -> tuple[str, str]:
    """Return what is wrong, and the remedy; an empty remedy if the first text has it."""
    location = _without_union_tags([str(part) for part in fault["loc"]], section)
    key = _users_name(location, names)
    if fault["type"] == "extra_forbidden":
        owner = _section_at(section, location[:-1])
        near = did_you_mean(location[-1], owner.model_fields) if owner is not None else ""
        elsewhere = [name for name in all_keys(section) if name.rpartition(".")[2] == location[-1]]
        if elsewhere:
            near = f"; did you mean {elsewhere[0]!r}?"
        return f"unknown key {key.partition(' (')[0]!r}{near}", ""
    if fault["type"] == "missing":
        return f"key {key!r} is missing", ""
    if fault["type"] in ("model_type", "model_attributes_type"):
        owner = _section_at(section, location) or section
        return (
            f"{key} is {shown(fault['input'])}: ",
            f"it is a section; set its keys, such as {key}.{next(iter(owner.model_fields))}",
        )
    message = _remedy(fault)
    if fault["type"] in ("greater_than", "greater_than_equal") and _accepts_null(location, section):
        message += ", or null"
    return f"{key} is {shown(fault['input'])}: ", message


def _remedy(fault: ErrorDetails) -> str:
    message = fault["msg"].removeprefix("Value error, ")
    return message[0].lower() + message[1:]


def _users_name(location: Sequence[str], names: Mapping[str, str]) -> str:
    """Return the key under which a value was given."""
    key = ".".join(location)
    for length in range(len(location), 0, -1):
        ours = ".".join(location[:length])
        theirs = names.get(ours, ours)
        if theirs != ours:
            return f"{theirs}{key[len(ours) :]} ({ours} here)"
    return key


def _accepts_null(location: Sequence[str], section: type[BaseModel]) -> bool:
    """Return whether a setting has one type and may be None."""
    owner = _section_at(section, location[:-1])
    info = owner.model_fields.get(location[-1]) if owner is not None else None
    types = get_args(info.annotation) if info is not None else ()
    return len(types) == 2 and type(None) in types


def _without_union_tags(location: list[str], section: type[BaseModel]) -> list[str]:
    """Remove the type that pydantic adds to the location of a value whose annotation is a union."""
    for depth, name in enumerate(location):
        owner = _section_at(section, location[:depth])
        info = owner.model_fields.get(name) if owner is not None else None
        if info is not None and get_origin(info.annotation) in (Union, UnionType):
            has_tag = len({*get_args(info.annotation)} - {type(None)}) > 1
            return [*location[: depth + 1], *location[depth + 1 + has_tag :]]
    return location


def all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the dotted keys of a section and of its subsections."""
    keys: list[str] = []
    for name, info in section.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += all_keys(inner, prefix=f"{prefix}{name}.")
        else:
            keys.append(f"{prefix}{name}")
    return keys


def _section_at(section: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    """Return the section at a path of keys and, in mappings of sections, of the user's names."""
    is_name = False
    for part in path:
        if is_name:
            is_name = False
            continue
        info = section.model_fields.get(part)
        inner = None if info is None else _section_of(info.annotation)
        if info is not None and inner is None:
            inner, is_name = _named_section(info.annotation), True
        if inner is None:
            return None
        section = inner
    return None if is_name else section


def _named_section(annotation: Any) -> type[BaseModel] | None:
    """Return the section of each value of a mapping, such as `distillation.teachers`."""
    if get_origin(annotation) is not dict:
        return None
    return _section_of(get_args(annotation)[1])


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section of a field that holds one, or may be None."""
    types = (
        {*get_args(annotation)} - {type(None)}
        if get_origin(annotation) in (Union, UnionType)
        else {annotation}
    )
    inner = types.pop() if len(types) == 1 else None
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None

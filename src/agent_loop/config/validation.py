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
    location, owner, annotation = _resolve([str(part) for part in fault["loc"]], section)
    key, name = _users_name(location, names), location[-1] if location else ""
    if fault["type"] == "extra_forbidden":
        elsewhere = [each for each in all_keys(section) if each.rpartition(".")[2] == name]
        near = did_you_mean(name, owner.model_fields) if owner is not None else ""
        if elsewhere:
            near = f"; did you mean {elsewhere[0]!r}?"
        return f"unknown key {key.partition(' (')[0]!r}{near}", ""
    if fault["type"] == "missing":
        return f"key {key!r} is missing", ""
    found = f"{key} is {shown(fault['input'])}: "
    if fault["type"] in ("model_type", "model_attributes_type"):
        inner = next(iter((owner or section).model_fields))
        return found, f"it is a section; set its keys, such as {key}.{inner}"
    message = _remedy(fault)
    if fault["type"] in ("greater_than", "greater_than_equal") and len(_types(annotation)) == 1:
        message += ", or null" if type(None) in get_args(annotation) else ""
    return found, message


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


def all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the dotted keys of a section and of its subsections."""
    keys: list[str] = []
    for name, info in section.model_fields.items():
        inner = _section(info.annotation)
        if inner is not None:
            keys += all_keys(inner, prefix=f"{prefix}{name}.")
        else:
            keys.append(f"{prefix}{name}")
    return keys


def _resolve(
    location: Sequence[str], section: type[BaseModel]
) -> tuple[list[str], type[BaseModel] | None, Any]:
    """Follow the location of a fault from a section.

    Returns:
        The location without the types that pydantic adds to values of unions; the last section on the way, or None if
        the way goes on below a setting; and the annotation of the last setting on the way.
    """
    owner: type[BaseModel] | None = section
    annotation: Any = None
    kept: list[str] = []
    parts = iter(location)
    for name in parts:
        kept.append(name)
        if owner is None or name not in owner.model_fields:
            continue
        annotation = owner.model_fields[name].annotation
        types = _types(annotation)
        if len(types) > 1:
            next(parts, None)
        inner: Any = types[0]
        if get_origin(inner) is dict:  # sections by names of the user, such as `distillation.teachers`
            inner = get_args(inner)[1]
            kept += [each for each in [next(parts, None)] if each is not None]
        owner = _section(inner) if len(types) == 1 else None
    return kept, owner, annotation


def _section(kind: Any) -> type[BaseModel] | None:
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _types(annotation: Any) -> list[Any]:
    """Return the types of a setting but None."""
    is_union = get_origin(annotation) in (Union, UnionType)
    return [each for each in (get_args(annotation) if is_union else (annotation,)) if each is not type(None)]

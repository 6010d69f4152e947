"""Validation of settings, with errors that say what is wrong and what to do."""

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


def parse_section(section: type[SectionT], values: Mapping[str, Any], *, where: str) -> SectionT:
    """Checks a mapping against a section.

    Raises:
        ConfigError: One line per fault: what, got, do.
    """
    try:
        return section.model_validate(dict(values))
    except ValidationError as error:
        raise _refusal(error, section, where=where) from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def parse_options(options: type[OptionsT], values: Mapping[str, Any], *, where: str) -> OptionsT:
    """Check a mapping against the fields of a dataclass.

    Raises:
        ConfigError: One line per fault: what, got, do.
    """
    try:
        return TypeAdapter(options).validate_python(dict(values))
    except ValidationError as error:
        raise _refusal(error, None, where=where) from None


def _refusal(error: ValidationError, section: type[BaseModel] | None, *, where: str) -> ConfigError:
    faults: dict[str, list[str]] = {}
    for fault in error.errors():
        what, do = _explain(fault, section or BaseModel)
        faults.setdefault(what, []).append(do)  # a value that may be of several kinds has one for each
    lines = [what + ", or ".join(filter(None, dos)) for what, dos in faults.items()]
    return ConfigError(f"{where}: " + "\n".join(lines))


def _explain(fault: ErrorDetails, section: type[BaseModel]) -> tuple[str, str]:
    """What is wrong, and what to do; nothing where the first says it."""
    location = _without_kind([str(part) for part in fault["loc"]], section)
    key = ".".join(location)
    if fault["type"] == "extra_forbidden":
        owner = _section_at(section, location[:-1])
        near = did_you_mean(location[-1], owner.model_fields) if owner is not None else ""
        elsewhere = [name for name in all_keys(section) if name.rpartition(".")[2] == location[-1]]
        if elsewhere:
            near = f"; did you mean {elsewhere[0]!r}?"
        return f"unknown key {key!r}{near}", ""
    if fault["type"] == "missing":
        return f"key {key!r} is missing", ""
    if fault["type"] in ("model_type", "model_attributes_type"):
        owner = _section_at(section, location) or section
        return (
            f"{key} is {shown(fault['input'])}: ",
            f"give it keys, such as {key}.{next(iter(owner.model_fields))}",
        )
    message = fault["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    return f"{key} is {shown(fault['input'])}: ", message


def _without_kind(location: list[str], section: type[BaseModel]) -> list[str]:
    """Where a value may be of several kinds, pydantic names behind its key the kind that was tried."""
    for depth, name in enumerate(location):
        owner = _section_at(section, location[:depth])
        info = owner.model_fields.get(name) if owner is not None else None
        if info is not None and get_origin(info.annotation) in (Union, UnionType):
            has_kinds = len({*get_args(info.annotation)} - {type(None)}) > 1
            return [*location[: depth + 1], *location[depth + 1 + has_kinds :]]
    return location


def all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Every key of a section and of those below it, dotted."""
    keys: list[str] = []
    for name, info in section.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += all_keys(inner, prefix=f"{prefix}{name}.")
        else:
            keys.append(f"{prefix}{name}")
    return keys


def _section_at(section: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    for part in path:
        info = section.model_fields.get(part)
        inner = info.annotation if info is not None else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return None
        section = inner
    return section

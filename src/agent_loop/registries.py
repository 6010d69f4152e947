"""Names that users give to classes of their own: by decorators, and in YAML lists."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from agent_loop.config import Section, parse_section
from agent_loop.errors import ConfigError, did_you_mean
from agent_loop.files.plain_values import read_yaml, shown
from agent_loop.loading import load_object
from agent_loop.runtime.boundary import describe_error

EntryT = TypeVar("EntryT", bound=Section)
BaseT = TypeVar("BaseT")


def warn_if_replaced(known: type | str | None, by: type, *, what: str) -> None:
    """Warn that a registered class is replaced. Called by the decorators `register`, for the caller of the decorator.

    A class that is defined again, as when its module is loaded twice, replaces itself without a warning.

    Args:
        known: The class that has the name already, or its full name; None if the name is free.
        by: The class that gets the name.
        what: The name, for the message: `agent loop 'tool_agent'`.
    """
    before = _full_name(known) if isinstance(known, type) else known
    if before is not None and before != _full_name(by):
        warnings.warn(f"{what} was {before}; {_full_name(by)} replaces it", stacklevel=3)


def read_entries(path: str | Path, *, entry_type: type[EntryT], list_key: str, key: str) -> list[EntryT]:
    """The entries of the list that the file holds under `list_key`. `${...}` interpolation is OmegaConf's.

    Args:
        path: A YAML file, relative to where the command runs.
        entry_type: What each entry must be.
        list_key: The only key that the file may hold.
        key: The configuration key the path comes from, for the error.

    Raises:
        ConfigError: The file is missing, is not YAML, or holds something else.
    """
    content = read_yaml(path, what=f"{key}: file", resolve=True)
    entries: Any = cast(dict[str, Any], content).get(list_key) if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: there is no list under {list_key!r}; begin the file with `{list_key}:`")
    for name in cast(dict[str, Any], content):
        if name != list_key:
            raise ConfigError(f"{path}: unknown key {name!r}{did_you_mean(name, [list_key])}")
    return [
        _parse_entry(entry, entry_type=entry_type, where=f"{path}: {list_key}[{index}]")
        for index, entry in enumerate(cast(list[Any], entries))
    ]


def load_class(reference: str, *, base: type[BaseT], key: str) -> type[BaseT]:
    """The class that a reference names.

    Raises:
        ConfigError: There is no such class, or it is not a subclass of `base`.
    """
    loaded = load_object(reference, key=key)
    if not isinstance(loaded, type):
        raise ConfigError(
            f"{key} is {reference!r}, an object of type {type(loaded).__name__}; "
            f"name a subclass of {base.__name__}"
        )
    if not issubclass(loaded, base):
        raise ConfigError(
            f"{key} is {reference!r}, which is no subclass of {base.__name__}; derive it from that"
        )
    return loaded


def construct(make: Callable[..., BaseT], *args: Any, where: str) -> BaseT:
    """Makes an object of a user's class.

    Raises:
        ConfigError: Making it raised.
    """
    try:
        return make(*args)
    except Exception as error:
        name = getattr(make, "__name__", repr(make))
        if isinstance(error, ConfigError):
            raise ConfigError(f"{where}: making a {name} raised ConfigError: {error}") from error
        raise ConfigError(f"{where}: making a {name} raised {describe_error(error)}") from error


def _full_name(named: type) -> str:
    return f"{named.__module__}.{named.__qualname__}"


def _parse_entry(entry: Any, *, entry_type: type[EntryT], where: str) -> EntryT:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} is {shown(entry)}; give keys: {', '.join(entry_type.model_fields)}")
    return parse_section(entry_type, cast(Mapping[str, Any], entry), where=where)

"""Rows of the table of verl's settings, and what their functions see."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from agent_loop.config.validation import parse_value
from agent_loop.config.whole import Config

MISSING = object()


def value_at(tree: Any, path: Sequence[str]) -> Any:
    """Return the value at a path of nested mappings; `MISSING` if there is none."""
    for part in path:
        if not isinstance(tree, Mapping) or part not in tree:
            return MISSING
        tree = cast(Mapping[str, Any], tree)[part]
    return tree


@dataclass(frozen=True, slots=True)
class Given:
    """Settings that are given, under verl's names and, as far as they are translated, under those of this package."""

    tree: Mapping[str, Any]
    settings: Mapping[str, Any]

    def get(self, *keys: str, kind: Any = Any) -> Any:
        """Return the value of the first of these keys of verl that has one, as a type; None if none has."""
        for key in keys:
            value = value_at(self.tree, key.split("."))
            if value is not MISSING and value not in (None, "None", "none", "null"):
                return parse_value(kind, value, key=key)
        return None

    def own(self, key: str, *, kind: Any = Any) -> Any:
        """Return the value of a key of this package, or its default."""
        value = value_at(self.settings, key.split("."))
        return parse_value(
            kind, value_at(default_settings(), key.split(".")) if value is MISSING else value, key=key
        )


@functools.cache
def default_settings() -> dict[str, Any]:
    """Return the defaults of this package, in nested mappings."""
    return Config().model_dump(mode="json")


Translate: TypeAlias = Callable[[Given], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Row of the table. That of a section applies to its keys too, unless a longer key has a row of its own.

    A row with a key and a note alone is of a key that is not needed here, for the reason in the note.
    """

    key: str
    note: str = ""
    target: str = ""
    """Setting here, or for a section, that of all its keys."""
    values: Mapping[Any, Any] = field(default_factory=dict[Any, Any])
    """Values of verl that are others here. Values that are not listed are the same."""
    refused: Mapping[Any, str] = field(default_factory=dict[Any, str])
    """Values of verl without a counterpart, and what to do instead."""
    accepted: Sequence[Any] = ()
    """Values that set nothing. The note says what to do instead of others."""
    differs: bool = False
    """Whether the run differs from verl's. The note says how, and is logged when the settings are loaded."""
    function: Translate | None = None
    """Function that translates the key together with others."""


COMBINED: list[Row] = []
"""Rows of the keys that are translated together."""


def together(section: str, names: str, note: str = "") -> Callable[[Translate], Translate]:
    """Return a decorator that adds rows for keys of a section, which the function translates together."""

    def add(function: Translate) -> Translate:
        COMBINED.extend(Row(key=key, note=note, function=function) for key in keys_of(section, names))
        return function

    return add


def keys_of(section: str, names: str) -> list[str]:
    """Return the dotted keys of names in a section. A section "" is the whole configuration."""
    return [f"{section}.{name}" if section else name for name in names.split()]

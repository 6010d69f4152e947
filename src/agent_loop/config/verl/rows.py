"""Rows of the table of verl's settings, and what their functions see."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
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


class Effect(Enum):
    """Effect of a key that sets nothing here."""

    NONE = auto()
    """The key is not needed. The note says why."""
    OTHER = auto()
    """The run differs from verl's. The note says what happens, and is logged when the settings are loaded."""


@dataclass(frozen=True, slots=True)
class Values:
    """A setting with other values here. Values that are not listed are the same."""

    target: str
    ours: Mapping[Any, Any]

    def of(self, value: Any) -> Any:
        """Return the value here of one of verl's values."""
        return next((ours for theirs, ours in self.ours.items() if theirs == value), value)


@dataclass(frozen=True, slots=True)
class Only:
    """A key that is accepted with these values, which set nothing. The note says what to do instead of others."""

    accepted: tuple[Any, ...]


Ours: TypeAlias = str | Values | Only | Effect | Translate
"""Setting here with the same values, of a section that of all its keys; or a function of several keys."""


@dataclass(frozen=True, slots=True)
class Row:
    """Row of the table. That of a section applies to its keys too, unless a longer key has a row of its own."""

    key: str
    ours: Ours
    note: str = ""


COMBINED: list[Row] = []
"""Rows of the keys that are translated together."""


def rows(section: str, names: str, ours: Ours, note: str = "") -> Iterator[Row]:
    """Yield a row for each of several keys of a section. A section "" is the whole configuration."""
    return (Row(f"{section}.{name}" if section else name, ours, note) for name in names.split())


def together(section: str, names: str, note: str = "") -> Callable[[Translate], Translate]:
    """Return a decorator that adds rows for keys of a section, which the function translates together."""

    def add(function: Translate) -> Translate:
        COMBINED.extend(rows(section, names, function, note))
        return function

    return add

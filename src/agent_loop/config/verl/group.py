"""Settings of verl that are translated together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Values(Protocol):
    """Values that are known so far."""

    def verl(self, *keys: str) -> Any:
        """Return the value of the first of these keys of verl that is given; None if none is."""
        ...

    def own(self, key: str) -> Any:
        """Return the value of a key of this package, or its default."""
        ...


@dataclass(frozen=True, slots=True)
class Group:
    """Settings of verl that are translated together."""

    keys: Sequence[str]
    translate: Callable[[Values], Mapping[str, Any]]
    """Returns settings of this package. Raises ConfigError if there is no counterpart."""
    depends: Sequence[str] = ()
    """Keys of this package on whose values the result depends."""


def keys(section: str, names: str) -> list[str]:
    """Return the keys of a section with these names."""
    return [f"{section}.{name}" for name in names.split()]

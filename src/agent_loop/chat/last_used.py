"""What is worth keeping, since it is asked for again soon."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")


class LastUsed(Generic[ValueT]):
    """Values by what they are made of; those used last are kept. Threads may share it."""

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._values: dict[Hashable, ValueT] = {}

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable, make: Callable[[], ValueT]) -> ValueT:
        """The value of a key, made where it is not kept."""
        try:
            value = self._values.pop(key)
        except KeyError:
            value = make()
        self._values[key] = value
        if len(self._values) > self._max_values:
            self._values.pop(next(iter(self._values)), None)
        return value

"""A cache of the values that were used last."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")


class LruCache(Generic[ValueT]):
    """Cache that keeps the `max_values` values used last. Threads may share it."""

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._values: dict[Hashable, ValueT] = {}

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable, make: Callable[[], ValueT]) -> ValueT:
        """Return the value of a key; call `make` if the cache does not hold the value."""
        try:
            value = self._values.pop(key)
        except KeyError:
            value = make()
        self._values[key] = value
        if len(self._values) > self._max_values:
            self._values.pop(next(iter(self._values)), None)
        return value

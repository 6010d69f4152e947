"""The least of many changing keys, in logarithmic time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

KeyT = TypeVar("KeyT", bound=tuple[Any, ...])


class Ranking(Generic[KeyT]):
    """Names in the order of their keys. Keys may change at any time; whoever changes one says so by `put`."""

    def __init__(self) -> None:
        self._keys: dict[str, KeyT] = {}
        self._heap: list[tuple[KeyT, str]] = []

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, name: str, key: KeyT) -> None:
        """Adds a name, or moves it to where its new key belongs."""
        self._keys[name] = key
        if self._heap and self._heap[0][1] == name:
            heapq.heapreplace(self._heap, (key, name))
        else:
            heapq.heappush(self._heap, (key, name))

    def discard(self, name: str) -> None:
        self._keys.pop(name, None)

    def first(self) -> str | None:
        """The name with the least key; None if there is none."""
        heap, keys = self._heap, self._keys
        if len(heap) > 2 * len(keys) + 64:
            heap = self._heap = [(key, name) for name, key in keys.items()]
            heapq.heapify(heap)
        while heap:
            key, name = heap[0]
            if keys.get(name) == key:
                return name
            heapq.heappop(heap)
        return None

    def first_key(self) -> KeyT | None:
        """The least key; None if there is none."""
        name = self.first()
        return None if name is None else self._keys[name]

    def first_where(self, accepts: Callable[[str], bool], *, at_most: int) -> str | None:
        """The first name that is accepted among the `at_most` least ones."""
        return next((name for name in self._least(at_most) if accepts(name)), None)

    def _least(self, count: int) -> Iterator[str]:
        taken: list[tuple[KeyT, str]] = []
        try:
            while len(taken) < count and self.first() is not None:
                taken.append(heapq.heappop(self._heap))
                yield taken[-1][1]
        finally:
            for entry in taken:
                if self._keys.get(entry[1]) == entry[0]:
                    heapq.heappush(self._heap, entry)

"""Priority queue whose keys can be changed, in logarithmic time per operation."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

KeyT = TypeVar("KeyT", bound=tuple[Any, ...])


class IndexedPriorityQueue(Generic[KeyT]):
    """Names ordered by key, lowest first. Call `put` again to change the key of a name.

    Outdated entries stay in the heap and are skipped when they reach its top.
    """

    def __init__(self) -> None:
        self._keys: dict[str, KeyT] = {}
        self._heap: list[tuple[KeyT, str]] = []

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, name: str, key: KeyT) -> None:
        """Add a name, or change its key."""
        self._keys[name] = key
        if self._heap and self._heap[0][1] == name:
            heapq.heapreplace(self._heap, (key, name))
        else:
            heapq.heappush(self._heap, (key, name))

    def discard(self, name: str) -> None:
        self._keys.pop(name, None)

    def first(self) -> str | None:
        """Return the name with the lowest key, or None if the queue is empty."""
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
        """Return the lowest key, or None if the queue is empty."""
        name = self.first()
        return None if name is None else self._keys[name]

    def first_where(self, accepts: Callable[[str], bool], *, at_most: int) -> str | None:
        """Return the first accepted name among the `at_most` names with the lowest keys, or None."""
        return next((name for name in self._lowest(at_most) if accepts(name)), None)

    def _lowest(self, count: int) -> Iterator[str]:
        """Yield up to `count` names in the order of their keys; the queue keeps the names."""
        popped: list[tuple[KeyT, str]] = []
        try:
            while len(popped) < count and self.first() is not None:
                popped.append(heapq.heappop(self._heap))
                yield popped[-1][1]
        finally:
            for entry in popped:
                if self._keys.get(entry[1]) == entry[0]:
                    heapq.heappush(self._heap, entry)

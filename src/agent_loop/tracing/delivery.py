"""A thread that writes what it is given, and never holds up who gives it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from agent_loop.runtime.describe import describe_error

logger = logging.getLogger(__name__)

LINGER_S = 0.1
"""How long a first item waits for others: one batch costs less than many items, and a thread that sleeps nothing."""

ItemT = TypeVar("ItemT")
ItemT_contra = TypeVar("ItemT_contra", contravariant=True)


class BatchWriter(Protocol[ItemT_contra]):
    """Writes items of one kind, as many at once as there are. All methods are called in one thread."""

    @property
    def max_batch(self) -> int:
        """How many items it is given at once at most."""
        ...

    def open(self) -> None:
        """Called once before the first items; again for the next ones if it raises."""
        ...

    def write(self, items: Iterable[ItemT_contra], /) -> None:
        """Raises: Exception: None of the items was written."""
        ...

    def close(self) -> None:
        """Writes what is held back, and ends. Called once, if `open` succeeded."""
        ...


class Writer(Protocol[ItemT_contra]):
    """Like `BatchWriter`, for one item at a time."""

    def open(self) -> None: ...

    def write(self, item: ItemT_contra, /) -> None:
        """Raises: Exception: The item was not written."""
        ...

    def close(self) -> None: ...


class OneByOne(Generic[ItemT]):
    """A writer of single items as a `BatchWriter`."""

    max_batch = 1

    def __init__(self, writer: Writer[ItemT]) -> None:
        self.open = writer.open
        self.close = writer.close
        self._write = writer.write

    def write(self, items: Iterable[ItemT], /) -> None:
        for item in items:
            self._write(item)


class Delivery(Generic[ItemT]):
    """A bounded queue in front of a writer. What does not fit, and what the writer fails on, is dropped, counted and
    said: once per kind of trouble, and in all at the end."""

    def __init__(self, writer: BatchWriter[ItemT], *, name: str, max_queued: int) -> None:
        self.name = name
        """Of the writer, in logs and metrics."""
        self.num_dropped = 0
        self._writer = writer
        self._max_queued = max_queued
        self._is_enough = min(writer.max_batch, max_queued)
        """So many do not wait for more."""
        self._queue: deque[ItemT] = deque()
        self._num_in_hand = 0
        """Of the items that are being written."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._said: set[str] = set()
        self._is_closing = False

    def put(self, item: ItemT) -> None:
        """Returns at once."""
        with self._changed:
            if self._is_closing:
                return
            is_full = len(self._queue) >= self._max_queued
            if not is_full:
                self._queue.append(item)
                if len(self._queue) in (1, self._is_enough):
                    self._changed.notify()
        if is_full:
            self._drop("full", f"it is {self._max_queued} behind")
        elif self._thread is None:
            self._thread = threading.Thread(
                target=self._run, daemon=True, name=f"agent-loop-{self.name}-writer"
            )
            self._thread.start()

    def close(self, *, timeout_s: float) -> None:
        """Waits at most so long until what is queued is written; the rest is dropped."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                self._drop("end", f"it did not end in {timeout_s:g} s", count=self._give_up())
        if self.num_dropped:
            logger.warning("%s: %d in all were not written", self.name, self.num_dropped)

    def _give_up(self) -> int:
        """How many items are left, the ones in hand included."""
        with self._changed:
            num_left = len(self._queue) + self._num_in_hand
            self._queue.clear()
            return num_left

    def _run(self) -> None:
        is_open = False
        while batch := self._next_batch():
            try:
                if not is_open:
                    self._writer.open()
                    is_open = True
                self._writer.write(batch)
            except Exception as error:  # noqa: BLE001  (whatever it raises, the rollout does not notice)
                self._drop(type(error).__name__, describe_error(error), count=len(batch))
        if is_open:
            try:
                self._writer.close()
            except Exception as error:  # noqa: BLE001  (as above)
                logger.warning("%s could not be closed: %s", self.name, describe_error(error))

    def _next_batch(self) -> list[ItemT]:
        """What has come, and comes within a moment; nothing at the end."""
        with self._changed:
            self._num_in_hand = 0
            self._changed.wait_for(lambda: self._queue or self._is_closing)
            self._changed.wait_for(
                lambda: len(self._queue) >= self._is_enough or self._is_closing, timeout=LINGER_S
            )
            self._num_in_hand = min(len(self._queue), self._writer.max_batch)
            return [self._queue.popleft() for _ in range(self._num_in_hand)]

    def _drop(self, kind: str, reason: str, *, count: int = 1) -> None:
        with self._changed:
            self.num_dropped += count
            is_new = kind not in self._said
            self._said.add(kind)
        if is_new:
            logger.warning("%s: not written, as others like it will not be: %s", self.name, reason)

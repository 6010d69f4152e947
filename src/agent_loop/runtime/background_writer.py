"""Writers that run in a background thread, so that the rollout never waits for them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

from agent_loop.runtime.describe import describe_error

logger = logging.getLogger(__name__)

BATCH_WINDOW_S = 0.1
"""Seconds for which the first item of a batch waits for others. A batch costs less than single items."""

ItemT = TypeVar("ItemT")
ItemT_contra = TypeVar("ItemT_contra", contravariant=True)


class BatchWriter(Protocol[ItemT_contra]):
    """Writer of batches of items. All methods are called in one thread."""

    @property
    def max_batch(self) -> int:
        """Largest number of items in one call of `write`."""
        ...

    def open(self) -> None:
        """Prepare the writer. Called before the first batch, and again before the next batch if it raised."""
        ...

    def write(self, items: Iterable[ItemT_contra], /) -> None:
        """Write all items of a batch, or raise and write none."""
        ...

    def close(self) -> None:
        """Flush buffered items and close. Called once, if `open` succeeded."""
        ...


class BackgroundWriter(Generic[ItemT]):
    """Bounded queue and thread in front of a `BatchWriter`.

    Items are dropped if the queue is full or the writer fails. Dropped items are counted. `report` is called once per
    reason, and with the total when the writer is closed. `convert` returns what is written of an item. It is called in
    the thread, for one item at a time, so that few objects are alive at once.
    """

    def __init__(
        self,
        writer: BatchWriter[Any],
        *,
        name: str,
        max_queued: int,
        convert: Callable[[ItemT], Any] | None = None,
        report: Callable[[str], None] = logger.warning,
    ) -> None:
        self.name = name
        """Name of the writer in logs and metrics."""
        self.num_dropped = 0
        self._writer = writer
        self._convert = convert
        self._report = report
        self._max_queued = max_queued
        self._full_batch = min(writer.max_batch, max_queued)
        """Number of queued items that is written without waiting for more."""
        self._queue: deque[ItemT] = deque()
        self._num_in_write = 0
        """Number of items that are being written."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._reported_kinds: set[str] = set()
        self._is_closing = False

    def put(self, item: ItemT) -> None:
        """Queue an item and return at once."""
        with self._changed:
            if self._is_closing:
                return
            is_full = len(self._queue) >= self._max_queued
            if not is_full:
                self._queue.append(item)
                if len(self._queue) in (1, self._full_batch):
                    self._changed.notify()
        if is_full:
            self._drop("full", f"{self._max_queued} items are queued already")
        elif self._thread is None:
            self._thread = threading.Thread(
                target=self._run, daemon=True, name=f"agent-loop-{self.name}-writer"
            )
            self._thread.start()

    def close(self, *, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds for queued items to be written, and drop the rest."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                with self._changed:
                    num_left = len(self._queue) + self._num_in_write
                    self._queue.clear()
                if num_left:
                    self._drop("end", f"it did not finish in {timeout_s:g} s", count=num_left)
        if self.num_dropped:
            self._report(f"{self.name}: {self.num_dropped} in total were not written")

    def _run(self) -> None:
        is_open = False
        while batch := self._next_batch():
            try:
                if not is_open:
                    self._writer.open()
                    is_open = True
                self._writer.write(batch if self._convert is None else map(self._convert, batch))
            except Exception as error:  # noqa: BLE001  (a writer's error must not reach the rollout)
                self._drop(type(error).__name__, describe_error(error), count=len(batch))
        if is_open:
            try:
                self._writer.close()
            except Exception as error:  # noqa: BLE001  (as above)
                self._report(f"{self.name}: closing failed: {describe_error(error)}")

    def _next_batch(self) -> list[ItemT]:
        """Wait for items and return up to `max_batch` of them; an empty list after `close`."""
        with self._changed:
            self._num_in_write = 0
            self._changed.wait_for(lambda: self._queue or self._is_closing)
            self._changed.wait_for(
                lambda: len(self._queue) >= self._full_batch or self._is_closing, timeout=BATCH_WINDOW_S
            )
            self._num_in_write = min(len(self._queue), self._writer.max_batch)
            return [self._queue.popleft() for _ in range(self._num_in_write)]

    def _drop(self, kind: str, reason: str, *, count: int = 1) -> None:
        with self._changed:
            self.num_dropped += count
            is_new = kind not in self._reported_kinds
            self._reported_kinds.add(kind)
        if is_new:
            self._report(f"{self.name} cannot be written: {reason}; the run continues, and reports it once")

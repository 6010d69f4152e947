"""Journal records of a worker's rows, on their way to the driver, which writes the journal."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

SEND_WITHIN_S = 0.5
"""Seconds that records wait for another message to travel with. They are lost if the worker dies before."""


class RecordBuffer:
    """Records of some rows, until the driver fetches them.

    Args:
        on_due: Called when the driver should fetch the records.
    """

    def __init__(self, on_due: Callable[[], None]) -> None:
        self._on_due = on_due
        self._records: list[tuple[str, bytes]] = []
        self._num_added = 0
        self._num_fetched = 0
        self._num_stored = 0
        self._flushes: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def sink(self, trajectory_id: str) -> RowRecordSink:
        """Return the sink for the log of one row."""
        return RowRecordSink(self, trajectory_id)

    def add(self, trajectory_id: str, payload: bytes) -> None:
        self._records.append((trajectory_id, payload))
        self._num_added += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SEND_WITHIN_S, self._on_due)

    async def flushed(self) -> None:
        """Wait until the driver has stored all records that were added."""
        if self._num_stored < self._num_added:
            is_stored = asyncio.get_running_loop().create_future()
            self._flushes.append((self._num_added, is_stored))
            if self._num_fetched < self._num_added:
                self._on_due()
            await is_stored

    def fetch(self) -> list[tuple[str, bytes]]:
        """Return trajectory id and payload of each record since the last fetch, in order."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        records, self._records = self._records, []
        self._num_fetched += len(records)
        return records

    def confirm(self) -> None:
        """Record that the driver has stored all records that it fetched."""
        self._num_stored = self._num_fetched
        while self._flushes and self._flushes[0][0] <= self._num_stored:
            _, is_stored = self._flushes.popleft()
            if not is_stored.done():
                is_stored.set_result(None)


@dataclass(frozen=True, slots=True)
class RowRecordSink:
    """Sink of one row's log. Implements `agent_loop.recording.record.Sink`."""

    buffer: RecordBuffer
    trajectory_id: str

    def append(self, payload: bytes) -> None:
        self.buffer.add(self.trajectory_id, payload)

    async def flushed(self, *, to_disk: bool = False) -> None:
        """Wait until the driver has stored the records. Its operating system has them then, not yet its disk."""
        await self.buffer.flushed()

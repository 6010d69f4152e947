"""What a worker's rows record, on its way to the driver, which writes the journal."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

SEND_WITHIN_S = 0.5
"""Records wait so long for something else to travel with: what a worker that dies may take along."""


class Relay:
    """The records of some rows until the driver fetches them.

    Args:
        announce: Told that the driver should fetch what there is.
    """

    def __init__(self, announce: Callable[[], None]) -> None:
        self._announce = announce
        self._records: list[tuple[str, bytes]] = []
        self._num_added = 0
        self._num_fetched = 0
        self._num_safe = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def sink(self, trajectory_id: str) -> RowRelay:
        """Where the log of one row appends."""
        return RowRelay(self, trajectory_id)

    def add(self, trajectory_id: str, payload: bytes) -> None:
        self._records.append((trajectory_id, payload))
        self._num_added += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SEND_WITHIN_S, self._announce)

    async def flushed(self) -> None:
        """Waits until the driver has kept all that was added."""
        if self._num_safe < self._num_added:
            safe = asyncio.get_running_loop().create_future()
            self._waiting.append((self._num_added, safe))
            if self._num_fetched < self._num_added:
                self._announce()
            await safe

    def fetch(self) -> list[tuple[str, bytes]]:
        """Trajectory and payload of each record since the last time, in order."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        records, self._records = self._records, []
        self._num_fetched += len(records)
        return records

    def confirm(self) -> None:
        """The driver has kept what it fetched."""
        self._num_safe = self._num_fetched
        while self._waiting and self._waiting[0][0] <= self._num_safe:
            _, safe = self._waiting.popleft()
            if not safe.done():
                safe.set_result(None)


@dataclass(frozen=True, slots=True)
class RowRelay:
    """A relay, for the log of one row. Implements `agent_loop.recording.sink.Sink`."""

    relay: Relay
    trajectory_id: str

    def append(self, payload: bytes) -> None:
        self.relay.add(self.trajectory_id, payload)

    async def flushed(self, *, to_disk: bool = False) -> None:
        """Wait until the driver has kept the records. Its operating system has them then, not yet its disk."""
        await self.relay.flushed()

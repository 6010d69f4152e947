"""Receivers of the records of trajectories."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Sink(Protocol):
    """Receiver of records, in order."""

    def append(self, payload: bytes) -> None:
        """Append a record.

        Raises:
            JournalError: An earlier record could not be written.
        """
        ...

    async def flushed(self, *, to_disk: bool = False) -> None:
        """Wait until the operating system has every record, so that a crash of the process loses no record.

        Args:
            to_disk: Wait until the records are on the disk too, so that a power failure loses no record.

        Raises:
            JournalError: A record could not be written.
        """
        ...


class Memory:
    """List of records in this process. Implements `Sink`."""

    def __init__(self, payloads: Iterable[bytes] = ()) -> None:
        self.payloads = list(payloads)
        """All records in packed form, oldest first."""

    def append(self, payload: bytes) -> None:
        self.payloads.append(payload)

    async def flushed(self, *, to_disk: bool = False) -> None:
        pass


class Discard:
    """Sink that drops all records. Implements `Sink`."""

    def append(self, payload: bytes) -> None:
        pass

    async def flushed(self, *, to_disk: bool = False) -> None:
        pass

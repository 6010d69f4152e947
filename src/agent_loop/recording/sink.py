"""Where the records of trajectories go."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Sink(Protocol):
    """Takes records, in order."""

    def append(self, payload: bytes) -> None:
        """Queues a record behind all others.

        Raises:
            JournalError: An earlier record could not be written.
        """
        ...

    async def flushed(self, *, to_disk: bool = False) -> None:
        """Wait until the operating system has every record that was appended: a process that is killed then loses
        none of them.

        Args:
            to_disk: Wait until they are on the disk too, so that a machine that loses power loses none of them.

        Raises:
            JournalError: One could not be written.
        """
        ...


class Memory:
    """Keeps records in this process. Implements `Sink`."""

    def __init__(self, payloads: Iterable[bytes] = ()) -> None:
        self.payloads = list(payloads)
        """All of them."""

    def append(self, payload: bytes) -> None:
        self.payloads.append(payload)

    async def flushed(self, *, to_disk: bool = False) -> None:
        pass


class Discard:
    """Keeps nothing. Implements `Sink`."""

    def append(self, payload: bytes) -> None:
        pass

    async def flushed(self, *, to_disk: bool = False) -> None:
        pass

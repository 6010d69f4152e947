"""Messages between the process of a server and the process of its engine, over a socket pair."""

from __future__ import annotations

import asyncio
import pickle
import struct
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

HEADER = struct.Struct("!Q")

FrameKind = Literal["start", "call", "stream", "cancel", "ready", "part", "end", "error", "refused"]


class Frame(NamedTuple):
    """Message. To the engine: start, call, stream, cancel. From the engine: ready, part, end, error, refused."""

    kind: FrameKind
    call: int
    """Number of the call that the message belongs to; 0 for the engine itself."""
    value: Any


class FrameProtocol(asyncio.Protocol):
    """Reads and writes frames.

    Args:
        on_frame: Called with each frame that arrives.
        on_end: Called once, when the connection is closed or lost.
    """

    def __init__(self, *, on_frame: Callable[[Frame], None], on_end: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_end = on_end
        self._received = bytearray()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # transports of uvloop are not subclasses

    def data_received(self, data: bytes) -> None:
        self._received += data
        start = 0
        while len(self._received) - start >= HEADER.size:
            (length,) = HEADER.unpack_from(self._received, start)
            end = start + HEADER.size + length
            if end > len(self._received):
                break
            frame = Frame(*pickle.loads(memoryview(self._received)[start + HEADER.size : end]))
            start = end
            self._on_frame(frame)
        del self._received[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_end()

    def send(self, frame: Frame) -> None:
        """Send a frame without blocking. Does nothing if the connection is lost."""
        if self._transport is not None:
            data = pickle.dumps(tuple(frame), protocol=pickle.HIGHEST_PROTOCOL)
            self._transport.write(HEADER.pack(len(data)) + data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

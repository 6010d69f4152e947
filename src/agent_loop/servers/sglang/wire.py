"""Frames between the process of a server and that of its engine, over a socket that only these two share."""

from __future__ import annotations

import asyncio
import pickle
import struct
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

HEADER = struct.Struct("!Q")

FrameKind = Literal["start", "call", "stream", "cancel", "ready", "part", "end", "error", "refused"]


class Frame(NamedTuple):
    """One message. To the engine: start, call, stream, cancel. From it: ready, part, end, error, refused."""

    kind: FrameKind
    call: int
    """Which call it belongs to; 0 for the engine itself."""
    value: Any


class FrameProtocol(asyncio.Protocol):
    """Splits what arrives into frames, and writes frames.

    Args:
        on_frame: Given each frame as it comes.
        on_end: Called once, when the other side is gone.
    """

    def __init__(self, *, on_frame: Callable[[Frame], None], on_end: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_end = on_end
        self._received = bytearray()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's are no subclasses

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
        """Never blocks; does nothing if the other side is gone."""
        if self._transport is not None:
            data = pickle.dumps(tuple(frame), protocol=pickle.HIGHEST_PROTOCOL)
            self._transport.write(HEADER.pack(len(data)) + data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

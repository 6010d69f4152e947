"""Messages between a server and the process of its engine, and the socket that carries them.

Messages that are sent in one iteration of the event loop travel together, up to `MAX_MESSAGES` at a time.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

SIZE_BYTES = 8
MAX_MESSAGES = 8
"""Largest number of messages that are sent together. The receiver processes them while the next ones are produced."""


class EngineCall(NamedTuple):
    """Call of a method of the server in the engine's process."""

    number: int
    """Identifies the call; its replies have the same number."""
    method: str
    arguments: tuple[Any, ...] = ()


class EngineReply(NamedTuple):
    """Result of a call, or the exception that it raised."""

    number: int
    value: Any
    is_last: bool = True
    """False for a part of a streamed result that is followed by more."""


class EngineConnection:
    """One end of a socket between two processes that trust each other. Messages are pickled."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._unsent: list[EngineCall | EngineReply] = []

    @classmethod
    async def open(cls, end: socket.socket) -> EngineConnection:
        """Open a connection on a connected Unix socket and take ownership of the socket."""
        return cls(*await asyncio.open_unix_connection(sock=end))

    def send(self, message: EngineCall | EngineReply) -> None:
        """Send a message in this iteration of the event loop, together with the others of the iteration.

        Does nothing if the connection is broken; `messages` ends then.
        """
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_all)
        self._unsent.append(message)
        if len(self._unsent) >= MAX_MESSAGES:
            self._send_all()

    async def messages(self) -> AsyncGenerator[EngineCall | EngineReply]:
        """Yield received messages until the other end is closed."""
        while True:
            try:
                size = int.from_bytes(await self._reader.readexactly(SIZE_BYTES))
                data = await self._reader.readexactly(size)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            for message in pickle.loads(data):
                yield message

    def close(self) -> None:
        """Send the unsent messages and close the connection. Can be called again."""
        if self._unsent:
            self._send_all()
        self._writer.close()

    def _send_all(self) -> None:
        messages, self._unsent = self._unsent, []
        if messages and not self._writer.is_closing():
            data = pickle.dumps(messages, protocol=pickle.HIGHEST_PROTOCOL)
            self._writer.writelines((len(data).to_bytes(SIZE_BYTES), data))

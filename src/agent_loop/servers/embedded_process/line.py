"""The line between a server and the process of its engine: what either says in one turn of its event loop goes
together, a few at a time."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

SIZE_BYTES = 8
MAX_MESSAGES = 8
"""So many go at once at most: the other side begins with them while the next ones are made."""


class Call(NamedTuple):
    """Asks for something; the answers bear its number."""

    number: int
    method: str
    arguments: tuple[Any, ...] = ()


class Answer(NamedTuple):
    """What a call gave, or an exception that it raised."""

    number: int
    value: Any
    is_last: bool = True
    """False for a part of what is streamed."""


class Line:
    """One end of a socket between two processes that trust each other: what is said is pickled."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._unsent: list[Call | Answer] = []

    @classmethod
    async def open(cls, end: socket.socket) -> Line:
        """A line on a connected Unix socket, which belongs to it from now on."""
        return cls(*await asyncio.open_unix_connection(sock=end))

    def say(self, message: Call | Answer) -> None:
        """Sends it, soon, with what else is said in this turn of the event loop. On a broken line, does nothing: who
        hears the end of the other side knows."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent.append(message)
        if len(self._unsent) >= MAX_MESSAGES:
            self._send()

    async def hear(self) -> AsyncGenerator[Call | Answer]:
        """What the other end says, until it is gone."""
        while True:
            try:
                size = int.from_bytes(await self._reader.readexactly(SIZE_BYTES))
                data = await self._reader.readexactly(size)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            for message in pickle.loads(data):
                yield message

    def close(self) -> None:
        """Sends what is unsent, and ends the line. Can be called again."""
        if self._unsent:
            self._send()
        self._writer.close()

    def _send(self) -> None:
        messages, self._unsent = self._unsent, []
        if messages and not self._writer.is_closing():
            data = pickle.dumps(messages, protocol=pickle.HIGHEST_PROTOCOL)
            self._writer.writelines((len(data).to_bytes(SIZE_BYTES), data))

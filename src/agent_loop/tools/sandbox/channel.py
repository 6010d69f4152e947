"""The agent's end of a socket to a sandbox: messages without blocking the event loop."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterable, Mapping
from typing import Any

from agent_loop.tools.sandbox.inside.wire import HEADER_BYTES, body_length, pack, unpack


class Channel:
    """Sends and receives whole messages. Takes the socket over."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end

    async def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message.

        Raises:
            OSError: The other end is closed.
        """
        await asyncio.get_running_loop().sock_sendall(self._socket, pack(message))

    async def receive(self, *, max_fds: int = 0) -> tuple[dict[str, Any], list[int]] | None:
        """The next message and the descriptors that came with it; None when the other end is closed.

        Raises:
            BadMessage: What came is no message.
            OSError: The other end was reset.
        """
        await wait_readable(self._socket.fileno())
        header, fds, _, _ = socket.recv_fds(self._socket, HEADER_BYTES, max_fds)
        try:
            header += await self._read(HEADER_BYTES - len(header)) if header else b""
            length = body_length(header)
            body = await self._read(length)
            if len(header) == HEADER_BYTES and len(body) == length:
                return unpack(body), fds
        except BaseException:
            close_all(fds)
            raise
        close_all(fds)
        return None

    def close(self) -> None:
        """Closes the socket, which the sandbox takes as the end."""
        self._socket.close()

    async def _read(self, length: int) -> bytes:
        """So many bytes; fewer when the other end is closed."""
        loop = asyncio.get_running_loop()
        data = b""
        while len(data) < length:
            chunk = await loop.sock_recv(self._socket, length - len(data))
            if not chunk:
                break
            data += chunk
        return data


def close_all(fds: Iterable[int]) -> None:
    """Closes descriptors."""
    for fd in fds:
        os.close(fd)


async def wait_readable(fd: int) -> None:
    """Waits until a descriptor has something to read; a process's handle, until the process has ended."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(fd, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(fd)

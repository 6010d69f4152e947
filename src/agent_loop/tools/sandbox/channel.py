"""The agent's end of the socket to a sandbox: messages without blocking the event loop."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterable, Mapping
from typing import Any

from agent_loop.tools.sandbox.inside.socket_messages import HEADER_BYTES, body_length, pack, unpack


class Channel:
    """Asynchronous message channel that owns its socket."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end

    async def send(self, message: Mapping[str, Any]) -> None:
        """Send a message.

        Raises:
            OSError: The other end is closed.
        """
        await asyncio.get_running_loop().sock_sendall(self._socket, pack(message))

    async def receive(self, *, max_fds: int = 0) -> tuple[dict[str, Any], list[int]] | None:
        """Return the next message and its file descriptors, or None when the other end is closed.

        Raises:
            BadMessage: The received bytes are not a valid message.
            OSError: The connection was reset.
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
        """Close the socket, at which the sandbox terminates."""
        self._socket.close()

    async def _read(self, length: int) -> bytes:
        """Read `length` bytes, or fewer if the other end closes."""
        loop = asyncio.get_running_loop()
        data = b""
        while len(data) < length:
            chunk = await loop.sock_recv(self._socket, length - len(data))
            if not chunk:
                break
            data += chunk
        return data


def close_all(fds: Iterable[int]) -> None:
    """Close file descriptors."""
    for fd in fds:
        os.close(fd)


async def wait_readable(fd: int) -> None:
    """Wait until a file descriptor is readable. A process descriptor becomes readable when the process exits."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(fd, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(fd)

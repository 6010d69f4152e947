"""Messages on a stream socket: a length of four bytes, then JSON.

File descriptors are sent with the first byte of a message.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any, cast

HEADER_BYTES = 4
MAX_MESSAGE_BYTES = 16 * 2**20


class BadMessage(Exception):
    """The received bytes are not a valid message."""


def pack(message: Mapping[str, Any]) -> bytes:
    """Return the bytes of a message."""
    body = json.dumps(message).encode()
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def body_length(header: bytes) -> int:
    """Return the number of bytes after the header.

    Raises:
        BadMessage: The number exceeds `MAX_MESSAGE_BYTES`.
    """
    length = int.from_bytes(header, "big")
    if length > MAX_MESSAGE_BYTES:
        raise BadMessage(f"a message has {length} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    return length


def unpack(body: bytes) -> dict[str, Any]:
    """Return the message with this body.

    Raises:
        BadMessage: The body is not a JSON object.
    """
    try:
        message = json.loads(body)
    except ValueError as error:
        raise BadMessage(f"a message is not valid JSON: {error}") from error
    if not isinstance(message, dict):
        raise BadMessage("a message is not a JSON object")
    return cast(dict[str, Any], message)


def send(channel: socket.socket, message: Mapping[str, Any], *, fds: Sequence[int] = ()) -> None:
    """Send a message. This call blocks."""
    data = memoryview(pack(message))
    sent = socket.send_fds(channel, [data], fds) if fds else 0
    channel.sendall(data[sent:])


def receive(channel: socket.socket, *, max_fds: int = 0) -> tuple[dict[str, Any], list[int]] | None:
    """Wait for the next message and return it with its file descriptors, or None when the other end is closed.

    Raises:
        BadMessage: The received bytes are not a valid message.
    """
    header, fds = b"", list[int]()
    while len(header) < HEADER_BYTES:
        data, new_fds, _, _ = socket.recv_fds(channel, HEADER_BYTES - len(header), max_fds)
        fds += new_fds
        if not data:
            return None
        header += data
    body = b""
    length = body_length(header)
    while len(body) < length:
        data = channel.recv(length - len(body))
        if not data:
            return None
        body += data
    return unpack(body), fds

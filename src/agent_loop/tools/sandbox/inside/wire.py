"""Messages on a stream socket: a length of four bytes, then JSON. File descriptors travel with a message's first
byte."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any, cast

HEADER_BYTES = 4
MAX_MESSAGE_BYTES = 16 * 2**20


class BadMessage(Exception):
    """What came is no message."""


def pack(message: Mapping[str, Any]) -> bytes:
    """The bytes of a message."""
    body = json.dumps(message).encode()
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def body_length(header: bytes) -> int:
    """How many bytes follow the header.

    Raises:
        BadMessage: More than any message has.
    """
    length = int.from_bytes(header, "big")
    if length > MAX_MESSAGE_BYTES:
        raise BadMessage(f"a message of {length} bytes")
    return length


def unpack(body: bytes) -> dict[str, Any]:
    """The message.

    Raises:
        BadMessage: It is no JSON object.
    """
    try:
        message = json.loads(body)
    except ValueError as error:
        raise BadMessage(f"no JSON: {error}") from error
    if not isinstance(message, dict):
        raise BadMessage("no JSON object")
    return cast(dict[str, Any], message)


def send(channel: socket.socket, message: Mapping[str, Any], *, fds: Sequence[int] = ()) -> None:
    """Sends a message, blocking."""
    data = memoryview(pack(message))
    sent = socket.send_fds(channel, [data], fds) if fds else 0
    channel.sendall(data[sent:])


def receive(channel: socket.socket, *, max_fds: int = 0) -> tuple[dict[str, Any], list[int]] | None:
    """Waits for the next message and the descriptors that came with it; None when the other end is closed.

    Raises:
        BadMessage: What came is no message.
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

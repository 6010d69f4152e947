"""The file: a header, then records, each with its length and a checksum. Nothing is ever changed but by appending.

    header   "agent-loop journal" and the number of the format, 32 bytes
    record   u32 length | u32 CRC-32 of length and payload | payload        (little-endian)

A process that is killed leaves a prefix of what it wrote, so only the last record can be incomplete. It is dropped. A
record whose checksum is wrong although all of it is there was damaged later; it is reported, and what follows it too.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from agent_loop.errors import JournalError

FORMAT = 3
HEADER = b"agent-loop journal ".ljust(28, b".") + struct.pack("<I", FORMAT)

_FRAME = struct.Struct("<II")
_LENGTH = struct.Struct("<I")


def framed(payload: bytes) -> bytes:
    """A record as it stands in the file."""
    return _FRAME.pack(len(payload), _checksum(payload)) + payload


@dataclass(frozen=True, slots=True)
class Scan:
    """What the bytes of a journal hold."""

    payloads: list[bytes]
    """Every record before the first that is not whole."""
    num_good_bytes: int
    """Where the next record goes."""
    num_torn_bytes: int = 0
    """Of a last record that was not written to its end."""
    num_damaged_bytes: int = 0
    """From the first damaged record to the end."""
    num_records_after_damage: int = 0
    """Whole records behind the damaged one, which nothing can vouch for any more."""


def scan(data: bytes) -> Scan:
    """Reads the records, as far as they are whole.

    Raises:
        JournalError: This is no journal, or one of another format.
    """
    if not data.startswith(HEADER):
        if HEADER.startswith(data):
            return Scan([], 0, num_torn_bytes=len(data))
        if data.startswith(HEADER[:28]):
            (found,) = _LENGTH.unpack_from(data.ljust(32, b"\0"), 28)
            raise JournalError(f"the journal has format {found}, and this version reads {FORMAT}; remove it")
        raise JournalError("the file is no journal; remove it, or give the path of a journal")
    payloads: list[bytes] = []
    place = len(HEADER)
    while place < len(data):
        payload = _payload_at(data, place)
        if payload is None:
            break
        payloads.append(payload)
        place += _FRAME.size + len(payload)
    rest = len(data) - place
    if not rest:
        return Scan(payloads, place)
    if _is_torn(data, place):
        return Scan(payloads, place, num_torn_bytes=rest)
    return Scan(
        payloads, place, num_damaged_bytes=rest, num_records_after_damage=_num_records_after(data, place)
    )


def _checksum(payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_LENGTH.pack(len(payload))))


def _payload_at(data: bytes, place: int) -> bytes | None:
    if place + _FRAME.size > len(data):
        return None
    length, checksum = _FRAME.unpack_from(data, place)
    start, end = place + _FRAME.size, place + _FRAME.size + length
    if not length or end > len(data):
        return None
    payload = data[start:end]
    return payload if checksum == _checksum(payload) else None


def _is_torn(data: bytes, place: int) -> bool:
    """Whether the record reaches beyond the end and no whole one follows. (A damaged length may reach there too.)"""
    if place + _FRAME.size > len(data):
        return True
    length, _ = _FRAME.unpack_from(data, place)
    return place + _FRAME.size + length > len(data) and not _finds_record(data, place + 1)


def _finds_record(data: bytes, start: int) -> bool:
    return any(_payload_at(data, place) is not None for place in range(start, len(data) - _FRAME.size))


def _num_records_after(data: bytes, place: int) -> int:
    length, _ = _FRAME.unpack_from(data, place)
    place += _FRAME.size + length
    count = 0
    while (payload := _payload_at(data, place)) is not None:
        count += 1
        place += _FRAME.size + len(payload)
    return count

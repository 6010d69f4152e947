"""The file format of a journal: a header, then records, each with a mark, its length and a checksum.

    header   "agent-loop journal" and the number of the format, 32 bytes
    record   mark, 4 bytes | u32 length | u32 CRC-32 of length and payload | payload        (little-endian)

Records are only appended. A process that is killed leaves a prefix of what it wrote, so only the last record can be
incomplete. Any other record that is not whole was damaged later; the mark tells where the next record begins.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from agent_loop.errors import JournalError

FORMAT = 5
MAGIC = b"agent-loop journal ".ljust(28, b".")
HEADER = MAGIC + struct.pack("<I", FORMAT)
MARK = b"\xf5REC"  # no UTF-8 text holds the first byte

_FRAME = struct.Struct("<4sII")
_LENGTH = struct.Struct("<I")
FRAME_BYTES = _FRAME.size
"""Bytes of a record besides its payload."""


def framed(payload: bytes) -> bytes:
    """Return the record of a payload, as it stands in the file."""
    return _FRAME.pack(MARK, len(payload), _checksum(payload)) + payload


@dataclass(frozen=True, slots=True)
class Scan:
    """What the bytes of a journal hold."""

    payloads: list[bytes]
    """All whole records, those after damage included."""
    num_good_bytes: int
    """The length of the file up to the first byte that belongs to no whole record."""
    num_torn_bytes: int = 0
    """The length of a last record that was not written to its end."""
    damage: tuple[range, ...] = ()
    """The bytes that were damaged after they had been written."""


def scan(data: bytes) -> Scan:
    """Read all records that are whole.

    Raises:
        JournalError: The file is not a journal, or has another format.
    """
    if HEADER.startswith(data):
        return Scan([], len(data) if data == HEADER else 0, num_torn_bytes=len(data) % len(HEADER))
    damage: list[range] = [] if _has_good_header(data) else [range(len(HEADER))]
    payloads: list[bytes] = []
    place, torn_from = len(HEADER), len(data)
    while place < len(data):
        payload = _payload_at(data, place)
        if payload is not None:
            end = place + FRAME_BYTES + len(payload)
        else:
            end = _next_marked(data, place)
            payload = _payload_of_damaged_length(data, place, end)
        if payload is not None:
            payloads.append(payload)
        elif end == len(data) and _is_torn(data, place):
            torn_from = place
        else:
            end = _end_by_length(data, place) or end
            damage.append(range(place, end))
        place = end
    num_good = damage[0].start if damage else torn_from
    return Scan(payloads, num_good, num_torn_bytes=len(data) - torn_from, damage=tuple(damage))


def _has_good_header(data: bytes) -> bool:
    if data.startswith(HEADER):
        return True
    if data.startswith(MAGIC):
        (found,) = _LENGTH.unpack_from(data.ljust(len(HEADER), b"\0"), len(MAGIC))
        raise JournalError(
            f"the journal has format {found}, and this version of agent-loop reads {FORMAT}; resume the run with the "
            "version that began it, or move the journal elsewhere to begin anew"
        )
    if data[len(MAGIC) : len(HEADER)] == HEADER[len(MAGIC) :] and _payload_at(data, len(HEADER)) is not None:
        return False
    raise JournalError(
        "the file is not a journal, or its first bytes are damaged; it was left as it is. Give the path of a journal, "
        "or move the file elsewhere to begin anew"
    )


def _checksum(payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_LENGTH.pack(len(payload))))


def _payload_at(data: bytes, place: int) -> bytes | None:
    """Return the payload of the whole record at `place`; None if there is none. A damaged mark does no harm."""
    if place + FRAME_BYTES > len(data):
        return None
    _, length, checksum = _FRAME.unpack_from(data, place)
    start, end = place + FRAME_BYTES, place + FRAME_BYTES + length
    if not length or end > len(data):
        return None
    payload = data[start:end]
    return payload if checksum == _checksum(payload) else None


def _next_marked(data: bytes, place: int) -> int:
    """Return where the first whole record after `place` begins that has a mark, or the end of the data."""
    start = data.find(MARK, place + 1)
    while start >= 0:
        if _payload_at(data, start) is not None:
            return start
        start = data.find(MARK, start + 1)
    return len(data)


def _end_by_length(data: bytes, place: int) -> int | None:
    """Return where the broken record at `place` ends by its own length; None if no record begins there."""
    if place + FRAME_BYTES > len(data):
        return None
    _, length, _ = _FRAME.unpack_from(data, place)
    end = place + FRAME_BYTES + length
    return end if end == len(data) or _payload_at(data, end) is not None else None


def _payload_of_damaged_length(data: bytes, place: int, end: int) -> bytes | None:
    """Return the payload between `place` and `end` if nothing but its length was damaged."""
    payload = data[place + FRAME_BYTES : end]
    if not payload:
        return None
    _, _, checksum = _FRAME.unpack_from(data, place)
    return payload if checksum == _checksum(payload) else None


def _is_torn(data: bytes, place: int) -> bool:
    """Return whether a record begins at `place`."""
    begins_well = data[place : place + len(MARK)] == MARK[: len(data) - place]
    if place + FRAME_BYTES > len(data):
        return begins_well
    _, length, _ = _FRAME.unpack_from(data, place)
    return begins_well and place + FRAME_BYTES + length > len(data)

"""File format of a journal: a header, then records, each with a mark, a length and a checksum.

    header   "agent-loop journal" and the number of the format, 32 bytes
    record   mark, 4 bytes | u32 length | u32 CRC-32 of length and payload | payload        (little-endian)

Records are only appended. If the process is killed, a prefix of its writes is in the file, so only the last record can
be incomplete. Any other invalid record was damaged later. A reader finds the next record by its mark.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from agent_loop.errors import JournalError

FORMAT = 5
MAGIC = b"agent-loop journal ".ljust(28, b".")
HEADER = MAGIC + struct.pack("<I", FORMAT)
MARK = b"\xf5REC"  # The first byte never occurs in UTF-8 text.

_FRAME = struct.Struct("<4sII")
_LENGTH = struct.Struct("<I")
FRAME_BYTES = _FRAME.size
"""Number of bytes of a record before its payload."""


def framed(payload: bytes) -> bytes:
    """Return the record of a payload, as bytes for the file."""
    return _FRAME.pack(MARK, len(payload), _checksum(payload)) + payload


@dataclass(frozen=True, slots=True)
class Scan:
    """Result of scanning the bytes of a journal."""

    payloads: list[bytes]
    """Payloads of all valid records, including records after damaged bytes."""
    num_good_bytes: int
    """Number of bytes before the first byte that is not part of a valid record."""
    num_torn_bytes: int = 0
    """Number of bytes of an incomplete last record."""
    damage: tuple[range, ...] = ()
    """Ranges of bytes that were damaged after they had been written."""


def scan(data: bytes) -> Scan:
    """Read all valid records.

    Raises:
        JournalError: The file is not a journal, or has another format.
    """
    if HEADER.startswith(data):
        return Scan([], len(data) if data == HEADER else 0, num_torn_bytes=len(data) % len(HEADER))
    damage: list[range] = [] if _has_good_header(data) else [range(len(HEADER))]
    payloads: list[bytes] = []
    start, torn_from = len(HEADER), len(data)
    while start < len(data):
        payload = _payload_at(data, start)
        if payload is not None:
            end = start + FRAME_BYTES + len(payload)
        else:
            end = _next_marked(data, start)
            payload = _payload_of_damaged_length(data, start, end)
        if payload is not None:
            payloads.append(payload)
        elif end == len(data) and _is_torn(data, start):
            torn_from = start
        else:
            end = _end_by_length(data, start) or end
            damage.append(range(start, end))
        start = end
    num_good = damage[0].start if damage else torn_from
    return Scan(payloads, num_good, num_torn_bytes=len(data) - torn_from, damage=tuple(damage))


def _has_good_header(data: bytes) -> bool:
    if data.startswith(HEADER):
        return True
    if data.startswith(MAGIC):
        (found,) = _LENGTH.unpack_from(data.ljust(len(HEADER), b"\0"), len(MAGIC))
        raise JournalError(
            f"the journal has format {found}, and this version of agent-loop reads {FORMAT}; resume the run with the "
            "version that started it, or move the journal elsewhere to start from the beginning"
        )
    if data[len(MAGIC) : len(HEADER)] == HEADER[len(MAGIC) :] and _payload_at(data, len(HEADER)) is not None:
        return False
    raise JournalError(
        "the file is not a journal, or its first bytes are damaged; it was not changed. Give the path of a journal, or "
        "move the file elsewhere to start from the beginning"
    )


def _checksum(payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_LENGTH.pack(len(payload))))


def _payload_at(data: bytes, start: int) -> bytes | None:
    """Return the payload of the record at `start`, or None if the record is invalid. A damaged mark is ignored."""
    if start + FRAME_BYTES > len(data):
        return None
    _, length, checksum = _FRAME.unpack_from(data, start)
    end = start + FRAME_BYTES + length
    if not length or end > len(data):
        return None
    payload = data[start + FRAME_BYTES : end]
    return payload if checksum == _checksum(payload) else None


def _next_marked(data: bytes, start: int) -> int:
    """Return the position of the first valid record after `start` whose mark is valid too, or the end of the data."""
    found = data.find(MARK, start + 1)
    while found >= 0:
        if _payload_at(data, found) is not None:
            return found
        found = data.find(MARK, found + 1)
    return len(data)


def _end_by_length(data: bytes, start: int) -> int | None:
    """Return the end of the damaged record at `start` by its length field, or None if no valid record follows it."""
    if start + FRAME_BYTES > len(data):
        return None
    _, length, _ = _FRAME.unpack_from(data, start)
    end = start + FRAME_BYTES + length
    return end if end == len(data) or _payload_at(data, end) is not None else None


def _payload_of_damaged_length(data: bytes, start: int, end: int) -> bytes | None:
    """Return the payload of the record from `start` to `end` if only its length field was damaged, else None."""
    payload = data[start + FRAME_BYTES : end]
    if not payload:
        return None
    _, _, checksum = _FRAME.unpack_from(data, start)
    return payload if checksum == _checksum(payload) else None


def _is_torn(data: bytes, start: int) -> bool:
    """Return whether an incomplete record begins at `start` and extends to the end of the data."""
    has_mark = data[start : start + len(MARK)] == MARK[: len(data) - start]
    if start + FRAME_BYTES > len(data):
        return has_mark
    _, length, _ = _FRAME.unpack_from(data, start)
    return has_mark and start + FRAME_BYTES + length > len(data)

"""File of a journal: a header, then records, which are only appended.

    header   "agent-loop journal" and the number of the format, 32 bytes
    record   u32 length | u32 CRC-32 of the length | u32 CRC-32 of the payload | payload        (little-endian)

A process that is killed leaves a prefix of its writes, so only the last record can be incomplete. Any other invalid
record was damaged later, and its journal is refused.
"""

from __future__ import annotations

import asyncio
import os
import struct
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from agent_loop.errors import JournalError
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.runtime.describe import describe_error

FORMAT = 8
MAGIC = b"agent-loop journal ".ljust(28, b".")
HEADER = MAGIC + struct.pack("<I", FORMAT)
CLOSE_TIMEOUT_S = 60.0

_FRAME = struct.Struct("<III")
_NUMBER = struct.Struct("<I")
FRAME_BYTES = _FRAME.size
"""Number of bytes of a record before its payload."""


def framed(payload: bytes) -> bytes:
    """Return the record of a payload, as bytes for the file."""
    length = len(payload)
    return _FRAME.pack(length, zlib.crc32(_NUMBER.pack(length)), zlib.crc32(payload)) + payload


def read_records(data: bytes) -> tuple[list[bytes], int]:
    """Return the payloads of a journal, and the number of its bytes without an incomplete last record.

    Raises:
        JournalError: The file is not a journal of this format, or a record was damaged after it had been written.
    """
    if HEADER.startswith(data):
        return [], len(data) if data == HEADER else 0
    _check_header(data)
    payloads: list[bytes] = []
    start = len(HEADER)
    while start + FRAME_BYTES <= len(data):
        length, length_checksum, checksum = _FRAME.unpack_from(data, start)
        is_damaged = length_checksum != zlib.crc32(_NUMBER.pack(length))
        end = start + FRAME_BYTES + length
        if not is_damaged and end > len(data):
            break
        payload = data[start + FRAME_BYTES : end]
        if is_damaged or checksum != zlib.crc32(payload):
            raise JournalError(
                f"the journal is damaged at byte {start}; restore the file from a copy, or move it elsewhere to start "
                "from the beginning. Every row is then run again, including its calls of tools that may be used only "
                "once"
            )
        payloads.append(payload)
        start = end
    return payloads, start


def _check_header(data: bytes) -> None:
    if data.startswith(HEADER):
        return
    if data.startswith(MAGIC):
        (found,) = _NUMBER.unpack_from(data.ljust(len(HEADER), b"\0"), len(MAGIC))
        raise JournalError(
            f"the journal has format {found}, and this version of agent-loop reads {FORMAT}; resume the run with the "
            "version that started it, or move the journal elsewhere to start from the beginning"
        )
    raise JournalError(
        "the file is not a journal, or its first bytes are damaged; it was not changed. Give the path of a journal, or "
        "move the file elsewhere to start from the beginning"
    )


class JournalWriter:
    """Writer of one journal, in a thread. Use it with `async with`.

    Records reach the operating system as soon as the thread writes them. They reach the disk (fsync) when a caller
    waits with `to_disk`, and when the writer is closed. If a write fails, the incomplete records are removed from the
    file, and later records are refused.

    Args:
        path: The file. Its folder is created.
        num_bytes: Number of bytes of the existing file to keep; 0 starts a new file.
    """

    def __init__(self, path: Path, *, num_bytes: int = 0) -> None:
        self.path = path
        self._num_bytes = num_bytes
        self._queue: deque[bytes] = deque()
        self._is_scheduled = False
        self._error: JournalError | None = None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="agent-loop-journal")
        self._file = -1

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        try:
            await self._loop.run_in_executor(self._executor, self._open)
        except BaseException:
            self._executor.shutdown(wait=False)
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            await run_shielded(self._end, timeout_s=CLOSE_TIMEOUT_S)
        except JournalError:
            if error is None:
                raise
        finally:
            self._executor.shutdown(wait=False)

    def append(self, payload: bytes) -> None:
        if self._error is not None:
            raise self._error
        self._queue.append(framed(payload))
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._executor.submit, self._write_queued)

    async def flushed(self, *, to_disk: bool = False) -> None:
        if self._error is None:
            await self._loop.run_in_executor(self._executor, self._write_queued, to_disk)
        if self._error is not None:
            raise self._error

    async def _end(self) -> None:
        try:
            await self.flushed(to_disk=True)
        finally:
            await self._loop.run_in_executor(self._executor, self._close)

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.ftruncate(self._file, self._num_bytes)
            os.lseek(self._file, 0, os.SEEK_END)
            if not self._num_bytes:
                self._write(HEADER)
        except OSError as error:
            raise self._describe(error) from error

    def _write_queued(self, to_disk: bool = False) -> None:
        self._is_scheduled = (
            False  # before the queue is read: a record that is appended from now on schedules a write
        )
        records: list[bytes] = []
        while self._queue:
            records.append(self._queue.popleft())
        if self._error is not None:
            return
        try:
            self._write(b"".join(records))
            if to_disk:
                os.fsync(self._file)
        except OSError as error:
            self._error = self._describe(error)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            os.ftruncate(self._file, self._num_bytes)
            os.lseek(self._file, self._num_bytes, os.SEEK_SET)
            raise
        self._num_bytes += len(data)

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _describe(self, error: OSError) -> JournalError:
        described = JournalError(
            f"the journal {str(self.path)!r} cannot be written ({describe_error(error)}); its earlier records are "
            "intact. Fix the cause and resume, or disable the journal with rollout.journal=false"
        )
        described.__cause__ = error
        return described

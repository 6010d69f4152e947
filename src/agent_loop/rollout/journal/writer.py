"""Writer of records to a journal file, in order, in a background thread."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from agent_loop.errors import JournalError
from agent_loop.rollout.journal.frames import HEADER, framed
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.runtime.describe import describe_error

CLOSE_TIMEOUT_S = 60.0


class JournalWriter:
    """Writer of one journal file, in one thread, one batch of records at a time. Use it with `async with`.

    Records reach the operating system as soon as the thread writes them. They reach the disk (fsync) when a caller
    waits with `to_disk`, and when the writer is closed. If a write fails, the incomplete batch is removed from the
    file, and later records are refused.

    Args:
        path: The file. Its folder is created.
        num_bytes: Number of bytes of the existing file to keep; 0 starts a new file.
        write: `os.write`, or a stub.
        sync: `os.fsync`, or a stub.
    """

    def __init__(
        self,
        path: Path,
        *,
        num_bytes: int = 0,
        write: Callable[[int, bytes | memoryview], int] = os.write,
        sync: Callable[[int], None] = os.fsync,
    ) -> None:
        self.path = path
        self._write = write
        self._sync = sync
        self._num_bytes = num_bytes
        self._queue: list[bytes] = []
        self._num_appended = 0
        self._num_written = 0
        self._num_on_disk = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._waiting_for_disk: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._is_due = False
        self._writing: asyncio.Future[None] | None = None
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
        self._num_appended += 1
        if not self._is_due and self._writing is None:
            self._is_due = True
            self._loop.call_soon(self._start)

    async def flushed(self, *, to_disk: bool = False) -> None:
        num_safe, waiting = self._num_written, self._waiting
        if to_disk:
            num_safe, waiting = self._num_on_disk, self._waiting_for_disk
        if self._error is None and num_safe < self._num_appended:
            safe = self._loop.create_future()
            waiting.append((self._num_appended, safe))
            self._start()
            await safe
        if self._error is not None:
            raise self._error

    def _start(self) -> None:
        """Write the queued records in the thread, with an fsync if a caller waits for the disk."""
        self._is_due = False
        syncs = bool(self._waiting_for_disk)
        if self._writing is not None or self._error is not None or not (self._queue or syncs):
            return
        batch, self._queue = self._queue, []
        self._writing = self._loop.run_in_executor(self._executor, self._write_batch, batch, syncs)
        self._writing.add_done_callback(partial(self._end_batch, len(batch), syncs))

    def _end_batch(self, num_records: int, is_on_disk: bool, writing: asyncio.Future[None]) -> None:
        self._writing = None
        error = writing.exception()
        if error is None:
            self._num_written += num_records
            self._num_on_disk = self._num_written if is_on_disk else self._num_on_disk
        else:
            self._error = self._describe(error, "written")
        self._wake(self._waiting, self._num_written)
        self._wake(self._waiting_for_disk, self._num_on_disk)
        self._start()

    def _wake(self, waiting: deque[tuple[int, asyncio.Future[None]]], num_safe: int) -> None:
        while waiting and (self._error is not None or waiting[0][0] <= num_safe):
            _, safe = waiting.popleft()
            if not safe.done():
                safe.set_result(None)

    async def _end(self) -> None:
        try:
            await self.flushed()
        finally:
            try:
                await self._loop.run_in_executor(self._executor, self._close)
            except OSError as error:
                raise self._describe(error, "flushed to the disk") from error

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.ftruncate(self._file, self._num_bytes)
            os.lseek(self._file, 0, os.SEEK_END)
            if not self._num_bytes:
                self._write_batch([HEADER], syncs=False)
        except OSError as error:
            raise self._describe(error, "written") from error

    def _write_batch(self, batch: Sequence[bytes], syncs: bool) -> None:
        data = memoryview(b"".join(batch))
        total = len(data)
        try:
            while data:
                data = data[self._write(self._file, data) :]
            if syncs:
                self._sync(self._file)
        except OSError:
            os.ftruncate(self._file, self._num_bytes)
            os.lseek(self._file, self._num_bytes, os.SEEK_SET)
            raise
        self._num_bytes += total

    def _close(self) -> None:
        if self._file < 0:
            return
        try:
            self._sync(self._file)
        finally:
            os.close(self._file)
            self._file = -1

    def _describe(self, error: BaseException, operation: str) -> JournalError:
        described = JournalError(
            f"the journal {str(self.path)!r} cannot be {operation} ({describe_error(error)}); its earlier records are "
            "intact. Fix the cause and resume, or disable the journal with rollout.journal=false"
        )
        described.__cause__ = error
        return described

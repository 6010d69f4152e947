"""A program in a process of its own: started, watched, and ended with everything that it started."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

from agent_loop.errors import ConfigError
from agent_loop.runtime.concurrency import run_shielded

MAX_KEPT_BYTES = 2**16
"""Of the end of each output."""
TERMINATE_GRACE_S = 5.0
"""Between SIGTERM and SIGKILL."""
DRAIN_S = 2.0
"""How long outputs are read after the end of the process, which others may hold open."""
STDIN, STDOUT, STDERR = range(3)


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What a process left."""

    exit_code: int
    """Negative: the signal that ended it."""
    stdout: str
    """The end of it."""
    stderr: str


async def run_command(command: Sequence[str], *, env: Mapping[str, str], stdin: bytes) -> CommandResult:
    """Runs a program to its end. It leads a process group; whatever is left of that is killed in the end, and all of it
    when the caller is cancelled.

    Args:
        command: The program and its arguments.
        env: Added to this process's environment.
        stdin: What it can read.

    Raises:
        ConfigError: There is no such program.
    """
    try:
        process, watch = await asyncio.get_running_loop().subprocess_exec(
            _OutputCollector, *command, env={**os.environ, **env}, start_new_session=True
        )
    except OSError as error:
        raise ConfigError(f"command {list(command)!r} cannot be started: {error}") from error
    with closing(process):
        try:
            _feed(process, stdin)
            await watch.exited.wait()
        finally:
            await run_shielded(lambda: _end(process, watch), timeout_s=2 * TERMINATE_GRACE_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await watch.drained.wait()
    return CommandResult(process.get_returncode() or 0, watch.text(STDOUT), watch.text(STDERR))


def _feed(process: asyncio.SubprocessTransport, data: bytes) -> None:
    """A program need not read what it is given."""
    pipe = process.get_pipe_transport(STDIN)
    assert isinstance(pipe, asyncio.WriteTransport)
    pipe.write(data)
    pipe.write_eof()


async def _end(process: asyncio.SubprocessTransport, watch: _OutputCollector) -> None:
    if not watch.exited.is_set():
        _signal_group(process, signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(TERMINATE_GRACE_S):
                await watch.exited.wait()
    _signal_group(process, signal.SIGKILL)
    await watch.exited.wait()


def _signal_group(process: asyncio.SubprocessTransport, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.get_pid(), number)


class _OutputCollector(asyncio.SubprocessProtocol):
    """Keeps the end of each output, however long it is. A process has exited when it has, whoever holds its outputs
    open."""

    def __init__(self) -> None:
        self.exited = asyncio.Event()
        self.drained = asyncio.Event()
        self._kept = {STDOUT: b"", STDERR: b""}
        self._open = {STDOUT, STDERR}

    def text(self, fd: int) -> str:
        """The end of an output."""
        return self._kept[fd].decode(errors="replace")

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._kept[fd] = (self._kept[fd] + data)[-MAX_KEPT_BYTES:]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        if not self._open:
            self.drained.set()

    def process_exited(self) -> None:
        self.exited.set()

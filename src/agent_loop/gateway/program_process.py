"""Runs an agent program as a child process, and kills all of its descendants when it ends."""

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
"""Bytes that are kept from the end of each output."""
TERMINATE_GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""
DRAIN_S = 2.0
"""Seconds that outputs are read after the process has exited. Other processes may hold the outputs open."""
STDIN, STDOUT, STDERR = range(3)


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Exit code and outputs of a process that has exited."""

    exit_code: int
    """Exit status; if negative, the number of the signal that ended the process."""
    stdout: str
    """The last `MAX_KEPT_BYTES` of standard output."""
    stderr: str
    """The last `MAX_KEPT_BYTES` of standard error."""


async def run_command(command: Sequence[str], *, env: Mapping[str, str], stdin: bytes) -> CommandResult:
    """Run a program until it exits.

    The program leads its own process group. Processes of the group that are left at the end are killed. The whole
    group is killed if the caller is cancelled.

    Args:
        command: The program and its arguments.
        env: Variables added to the environment of this process.
        stdin: Standard input of the program.

    Raises:
        ConfigError: The program cannot be started.
    """
    try:
        process, outputs = await asyncio.get_running_loop().subprocess_exec(
            OutputCollector, *command, env={**os.environ, **env}, start_new_session=True
        )
    except OSError as error:
        raise ConfigError(f"command {list(command)!r} cannot be started: {error}") from error
    with closing(process):
        try:
            _write_stdin(process, stdin)
            await outputs.exited.wait()
        finally:
            await run_shielded(lambda: _end(process, outputs), timeout_s=2 * TERMINATE_GRACE_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await outputs.drained.wait()
    return CommandResult(process.get_returncode() or 0, outputs.text(STDOUT), outputs.text(STDERR))


def _write_stdin(process: asyncio.SubprocessTransport, data: bytes) -> None:
    """Write the input and close it, without waiting for the program to read it."""
    pipe = process.get_pipe_transport(STDIN)
    assert isinstance(pipe, asyncio.WriteTransport)
    pipe.write(data)
    pipe.write_eof()


async def _end(process: asyncio.SubprocessTransport, outputs: OutputCollector) -> None:
    if not outputs.exited.is_set():
        _signal_group(process, signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(TERMINATE_GRACE_S):
                await outputs.exited.wait()
    _signal_group(process, signal.SIGKILL)
    await outputs.exited.wait()


def _signal_group(process: asyncio.SubprocessTransport, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.get_pid(), number)


class OutputCollector(asyncio.SubprocessProtocol):
    """Keeps the end of each output.

    Sets `exited` when the process exits, even if other processes hold its outputs open.
    """

    def __init__(self) -> None:
        self.exited = asyncio.Event()
        self.drained = asyncio.Event()
        self._kept = {STDOUT: b"", STDERR: b""}
        self._open = {STDOUT, STDERR}

    def text(self, fd: int) -> str:
        """Return the kept end of an output."""
        return self._kept[fd].decode(errors="replace")

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._kept[fd] = (self._kept[fd] + data)[-MAX_KEPT_BYTES:]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        if not self._open:
            self.drained.set()

    def process_exited(self) -> None:
        self.exited.set()

"""Runs commands as child processes, and kills all of their descendants when they end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

from agent_loop.errors import ConfigError
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.runtime.owner import OWNER_VARIABLE, this_process

MAX_KEPT_BYTES = 2**16
"""Bytes that are kept from the end of each output."""
TERMINATE_GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""
DRAIN_S = 2.0
"""Seconds that outputs are read after the process has exited. Other processes may hold the outputs open."""
STDIN, STDOUT, STDERR = range(3)

INHERITED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|COLORTERM|LANG|LANGUAGE|LC_[A-Z]+|TZ|TZDIR|TMPDIR|TEMP|TMP|HOSTNAME"
    r"|SSL_CERT_FILE|SSL_CERT_DIR|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|NODE_EXTRA_CA_CERTS"
    r"|LD_LIBRARY_PATH|LD_PRELOAD|VIRTUAL_ENV|CONDA_PREFIX|CONDA_DEFAULT_ENV|NODE_PATH|JAVA_HOME|GOPATH|GOROOT"
    r"|CUDA_HOME|CUDA_PATH|CUDA_VISIBLE_DEVICES|(OMP|MKL|OPENBLAS)_NUM_THREADS"
    r"|PYTHON(PATH|HOME|HASHSEED|UNBUFFERED|DONTWRITEBYTECODE|IOENCODING|UTF8|WARNINGS|FAULTHANDLER)"
    r"|XDG_[A-Z]+_(HOME|DIR|DIRS)"
)
"""Names of the variables that programs inherit. None of them holds a secret."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Exit code and outputs of a process that has ended."""

    exit_code: int
    """Exit status; if negative, the number of the signal that ended the process."""
    stdout: str
    """The last `MAX_KEPT_BYTES` of standard output."""
    stderr: str
    """The last `MAX_KEPT_BYTES` of standard error."""
    timed_out: bool = False
    """Whether the process was killed at its time limit."""
    omitted_bytes: int = 0
    """Bytes of both outputs that are not kept."""


async def run_command(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    stdin: bytes | BinaryIO = b"",
    cwd: str | os.PathLike[str] | None = None,
    timeout_s: float | None = None,
    stdout_sink: Callable[[bytes], object] | None = None,
) -> CommandResult:
    """Run a program until it exits.

    The program leads its own process group. Processes of the group that are left at the end are killed. The whole
    group is killed at the time limit, and if the caller is cancelled.

    Args:
        command: The program and its arguments.
        env: The whole environment of the program; see `inherited_environment`. `AGENT_LOOP_OWNER` is added, by which a
            later process recognises processes that a killed one left.
        stdin: Standard input of the program, or a file to read it from.
        cwd: Working folder of the program. None is the folder of this process.
        timeout_s: Time limit. A process that exceeds it is killed, and its result says so.
        stdout_sink: Gets all bytes of standard output, which are then not kept.

    Raises:
        ConfigError: The program cannot be started.
    """
    given: dict[str, Any] = {} if isinstance(stdin, bytes) else {"stdin": stdin}
    try:
        process, outputs = await asyncio.get_running_loop().subprocess_exec(
            lambda: OutputCollector(stdout_sink),
            *command,
            env={OWNER_VARIABLE: this_process().token, **env},
            cwd=cwd,
            start_new_session=True,
            **given,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"command {list(command)!r} cannot be started: {error}") from error
    timed_out = False
    with closing(process):
        try:
            if isinstance(stdin, bytes):
                _write_stdin(process, stdin)
            timed_out = not await _wait_until_set(outputs.exited, timeout_s=timeout_s)
        finally:
            await run_shielded(lambda: _end(process, outputs), timeout_s=2 * TERMINATE_GRACE_S)
        await _wait_until_set(outputs.drained, timeout_s=DRAIN_S)
    return CommandResult(
        exit_code=process.get_returncode() or 0,
        stdout=outputs.text(STDOUT),
        stderr=outputs.text(STDERR),
        timed_out=timed_out,
        omitted_bytes=outputs.omitted_bytes,
    )


def inherited_environment() -> dict[str, str]:
    """Return the variables of this process that programs inherit: paths, locale and the like, but no secrets."""
    return {name: value for name, value in os.environ.items() if INHERITED.fullmatch(name)}


async def _wait_until_set(event: asyncio.Event, *, timeout_s: float | None) -> bool:
    """Wait for an event. Return whether it was set within the time limit."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()


def _write_stdin(process: asyncio.SubprocessTransport, data: bytes) -> None:
    """Write the input and close it, without waiting for the program to read it."""
    pipe = process.get_pipe_transport(STDIN)
    assert isinstance(pipe, asyncio.WriteTransport)
    pipe.write(data)
    pipe.write_eof()


async def _end(process: asyncio.SubprocessTransport, outputs: OutputCollector) -> None:
    if not outputs.exited.is_set():
        _signal_group(process, signal.SIGTERM)
        await _wait_until_set(outputs.exited, timeout_s=TERMINATE_GRACE_S)
    _signal_group(process, signal.SIGKILL)
    await outputs.exited.wait()


def _signal_group(process: asyncio.SubprocessTransport, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.get_pid(), number)


class OutputCollector(asyncio.SubprocessProtocol):
    """Keeps the end of each output.

    Sets `exited` when the process exits, even if other processes hold its outputs open.
    """

    def __init__(self, stdout_sink: Callable[[bytes], object] | None = None) -> None:
        self.exited = asyncio.Event()
        self.drained = asyncio.Event()
        self.omitted_bytes = 0
        self._stdout_sink = stdout_sink
        self._kept = {STDOUT: b"", STDERR: b""}
        self._open = {STDOUT, STDERR}

    def text(self, fd: int) -> str:
        """Return the kept end of an output."""
        return self._kept[fd].decode(errors="replace")

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == STDOUT and self._stdout_sink is not None:
            self._stdout_sink(data)
            return
        whole = self._kept[fd] + data
        self._kept[fd] = whole[-MAX_KEPT_BYTES:]
        self.omitted_bytes += len(whole) - len(self._kept[fd])

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        if not self._open:
            self.drained.set()

    def process_exited(self) -> None:
        self.exited.set()

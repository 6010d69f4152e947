"""A program in a process of its own: started, watched, and ended with everything that it started."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from agent_loop.concurrency import run_shielded
from agent_loop.errors import ConfigError

MAX_KEPT_BYTES = 2**16
"""Of the end of each output."""
TERMINATE_GRACE_S = 5.0
"""Between SIGTERM and SIGKILL."""
DRAIN_S = 2.0
"""How long outputs are read after the end of the process, which others may hold open."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What a process left."""

    exit_code: int
    """Negative: the signal that ended it."""
    stdout: str
    """The end of it."""
    stderr: str


async def run_command(command: Sequence[str], *, env: Mapping[str, str], stdin: bytes) -> Finished:
    """Runs a program to its end. It leads a process group; whatever is left of that is killed in the end, and all of it
    when the caller is cancelled.

    Args:
        command: The program and its arguments.
        env: Added to this process's environment.
        stdin: What it can read.

    Raises:
        ConfigError: There is no such program.
    """
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, env={**os.environ, **env}, start_new_session=True
        )
    except OSError as error:
        raise ConfigError(f"command {list(command)!r} cannot be started: {error}") from error
    stdout, stderr = _Tail(process.stdout), _Tail(process.stderr)
    try:
        async with asyncio.TaskGroup() as group:
            calls = (stdout.read(), stderr.read(), _feed(process, stdin))
            piping = [group.create_task(call) for call in calls]
            await process.wait()
            _signal_group(process, signal.SIGKILL)
            await asyncio.wait(piping, timeout=DRAIN_S)
            for task in piping:
                task.cancel()
    finally:
        if process.returncode is None:
            await run_shielded(lambda: _end(process), timeout_s=2 * TERMINATE_GRACE_S)
    return Finished(process.returncode or 0, stdout.text, stderr.text)


async def _feed(process: asyncio.subprocess.Process, data: bytes) -> None:
    """A program need not read what it is given."""
    assert process.stdin is not None
    with suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(data)
        await process.stdin.drain()
        process.stdin.close()
        await process.stdin.wait_closed()


async def _end(process: asyncio.subprocess.Process) -> None:
    _signal_group(process, signal.SIGTERM)
    with suppress(TimeoutError):
        async with asyncio.timeout(TERMINATE_GRACE_S):
            await process.wait()
    _signal_group(process, signal.SIGKILL)
    await process.wait()


def _signal_group(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


class _Tail:
    """The end of an output, however long it is."""

    def __init__(self, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        self._stream = stream
        self._kept = b""

    async def read(self) -> None:
        while part := await self._stream.read(MAX_KEPT_BYTES):
            self._kept = (self._kept + part)[-MAX_KEPT_BYTES:]

    @property
    def text(self) -> str:
        return self._kept.decode(errors="replace")

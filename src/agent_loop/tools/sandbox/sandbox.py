"""The agent's side of one sandbox."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
from pathlib import Path
from typing import Any

from agent_loop.errors import SandboxError
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.runtime.threads import run_in_thread
from agent_loop.tools.sandbox.backend import SandboxBackend
from agent_loop.tools.sandbox.channel import Channel, close_all, wait_readable
from agent_loop.tools.sandbox.inside.files import remove_folder
from agent_loop.tools.sandbox.inside.socket_messages import BadMessage
from agent_loop.tools.sandbox.inside.supervisor import ExecutionResult
from agent_loop.tools.sandbox.settings import SandboxSettings

START_TIMEOUT_S = 60.0
RESPONSE_TIMEOUT_S = 10.0
EXIT_TIMEOUT_S = 10.0


class Sandbox:
    """Sandbox that runs calls one at a time and keeps state between them. Created by `open_sandbox`.

    Args:
        channel: Channel to the supervisor.
        handle: Descriptor of the supervisor's process (`pidfd_open`).
        settings: Settings with the limits of the sandbox.
        work: The folder on the host that the sandbox writes to, if it needs one.
    """

    def __init__(self, channel: Channel, *, handle: int, settings: SandboxSettings, work: str | None) -> None:
        self._channel = channel
        self._handle = handle
        self._timeout_s = settings.time_limit_s + settings.interrupt_grace_s + RESPONSE_TIMEOUT_S
        self._work = work
        self._is_closed = False

    async def run(self, code: str) -> ExecutionResult:
        """Run one call. After a cancellation, the sandbox cannot be used again and must be closed.

        Raises:
            SandboxError: The sandbox terminated, or does not respond.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._channel.send({"code": code})
                received = await self._channel.receive()
            if received is None:
                raise SandboxError("its supervisor terminated")
            return ExecutionResult(**received[0])
        except TimeoutError as error:
            raise SandboxError("its supervisor did not respond") from error
        except (OSError, BadMessage, TypeError) as error:
            raise SandboxError(f"its supervisor is broken: {error}") from error

    def host_status(self) -> dict[str, str]:
        """Return the host's status of the supervisor: user, capabilities and more, from `/proc/PID/status`."""
        pid = _read_fields(f"/proc/self/fdinfo/{self._handle}")["Pid"]
        return _read_fields(f"/proc/{pid}/status")

    async def close(self) -> None:
        """Terminate everything in the sandbox and remove its files. A cancellation does not interrupt it."""
        if not self._is_closed:
            self._is_closed = True
            await run_shielded(self._end, timeout_s=3 * EXIT_TIMEOUT_S)

    async def _end(self) -> None:
        self._channel.close()
        try:
            try:
                async with asyncio.timeout(EXIT_TIMEOUT_S):
                    await wait_readable(self._handle)
            except TimeoutError:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
                async with asyncio.timeout(EXIT_TIMEOUT_S):
                    await wait_readable(self._handle)
        finally:
            os.close(self._handle)
            if self._work is not None:
                await run_in_thread(remove_folder, self._work)


async def open_sandbox(backend: SandboxBackend) -> Sandbox:
    """Start a sandbox and wait until it accepts calls.

    Raises:
        SandboxError: The sandbox could not be started.
    """
    try:
        work = tempfile.mkdtemp(prefix="agent-loop-sandbox-") if backend.needs_folder else None
    except OSError as error:
        raise SandboxError(f"there is no folder for what the sandbox writes: {error}") from error
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            with theirs:
                await backend.spawn(theirs, work=work)
            received = await channel.receive(max_fds=1)
        return Sandbox(channel, handle=_read_handle(received), settings=backend.settings, work=work)
    except BaseException as error:
        channel.close()
        if work is not None:
            remove_folder(work)
        if isinstance(error, TimeoutError):
            raise SandboxError("the sandbox did not start in time") from error
        if isinstance(error, (OSError, BadMessage)):
            raise SandboxError(f"the sandbox could not be started: {error}") from error
        raise


def _read_handle(received: tuple[dict[str, Any], list[int]] | None) -> int:
    if received is None:
        raise SandboxError("the sandbox terminated during its start")
    message, handles = received
    if "error" in message or not handles:
        close_all(handles)
        raise SandboxError(f"the sandbox could not be started: {message.get('error', message)}")
    return handles[0]


def _read_fields(path: str) -> dict[str, str]:
    lines = Path(path).read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

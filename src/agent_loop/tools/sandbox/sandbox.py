"""One sandbox, from the agent's side."""

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
from agent_loop.tools.sandbox.channel import Channel, close_all, wait_readable
from agent_loop.tools.sandbox.inside.files import remove_folder
from agent_loop.tools.sandbox.inside.supervisor import Reply
from agent_loop.tools.sandbox.inside.wire import BadMessage
from agent_loop.tools.sandbox.settings import SandboxSettings
from agent_loop.tools.sandbox.source import SandboxSource

START_PATIENCE_S = 60.0
ANSWER_PATIENCE_S = 10.0
END_PATIENCE_S = 10.0


class Sandbox:
    """Runs calls, one at a time, with state kept between them. Made by `open_sandbox`.

    Args:
        channel: To the supervisor.
        handle: A descriptor of the supervisor's process (`pidfd_open`).
        settings: Its limits.
        work: The folder on the host that it writes to, where it needs one.
    """

    def __init__(self, channel: Channel, *, handle: int, settings: SandboxSettings, work: str | None) -> None:
        self._channel = channel
        self._handle = handle
        self._patience_s = settings.time_limit_s + settings.interrupt_grace_s + ANSWER_PATIENCE_S
        self._work = work
        self._is_closed = False

    async def run(self, code: str) -> Reply:
        """Runs one call. If it is cancelled, the sandbox is of no more use: close it.

        Raises:
            SandboxError: The sandbox ended by itself, or does not answer.
        """
        try:
            async with asyncio.timeout(self._patience_s):
                await self._channel.send({"code": code})
                received = await self._channel.receive()
            if received is None:
                raise SandboxError("its supervisor ended")
            return Reply(**received[0])
        except TimeoutError as error:
            raise SandboxError("its supervisor did not answer") from error
        except (OSError, BadMessage, TypeError) as error:
            raise SandboxError(f"its supervisor is out of order: {error}") from error

    def host_status(self) -> dict[str, str]:
        """What this machine knows of the sandbox's processes: user, capabilities ... (`/proc/PID/status`)."""
        pid = _read_fields(f"/proc/self/fdinfo/{self._handle}")["Pid"]
        return _read_fields(f"/proc/{pid}/status")

    async def close(self) -> None:
        """Ends everything in the sandbox and removes what it wrote; to the end even if cancelled."""
        if not self._is_closed:
            self._is_closed = True
            await run_shielded(self._end, timeout_s=3 * END_PATIENCE_S)

    async def _end(self) -> None:
        self._channel.close()
        try:
            try:
                async with asyncio.timeout(END_PATIENCE_S):
                    await wait_readable(self._handle)
            except TimeoutError:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
                async with asyncio.timeout(END_PATIENCE_S):
                    await wait_readable(self._handle)
        finally:
            os.close(self._handle)
            if self._work is not None:
                await run_in_thread(remove_folder, self._work)


async def open_sandbox(source: SandboxSource) -> Sandbox:
    """Starts a sandbox and waits until it takes calls.

    Raises:
        SandboxError: It could not be started.
    """
    try:
        work = tempfile.mkdtemp(prefix="agent-loop-sandbox-") if source.needs_folder else None
    except OSError as error:
        raise SandboxError(f"there is no folder for what the sandbox writes: {error}") from error
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    try:
        async with asyncio.timeout(START_PATIENCE_S):
            with theirs:
                await source.spawn(theirs, work=work)
            received = await channel.receive(max_fds=1)
        return Sandbox(channel, handle=_read_handle(received), settings=source.settings, work=work)
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
        raise SandboxError("the sandbox ended while it was started")
    message, handles = received
    if "error" in message or not handles:
        close_all(handles)
        raise SandboxError(f"the sandbox could not be started: {message.get('error', message)}")
    return handles[0]


def _read_fields(path: str) -> dict[str, str]:
    lines = Path(path).read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

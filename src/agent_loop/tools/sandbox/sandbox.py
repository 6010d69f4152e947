"""The agent's side of one sandbox: a Python process that it talks to over a socket, in lines of JSON."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import tempfile
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import agent_loop
from agent_loop.errors import SandboxError
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.runtime.threads import run_in_thread
from agent_loop.tools.sandbox.inside.files import remove_folder
from agent_loop.tools.sandbox.inside.supervisor import ExecutionResult
from agent_loop.tools.sandbox.settings import SandboxSettings

START_TIMEOUT_S = 60.0
RESPONSE_TIMEOUT_S = 10.0
EXIT_TIMEOUT_S = 10.0
MAX_MESSAGE_BYTES = 16 * 2**20
MAX_STDERR_BYTES = 2000
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "MPLBACKEND": "Agg",
    "MALLOC_ARENA_MAX": "2",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""The complete environment of the code, in addition to `HOME` and `TMPDIR`."""
BOOTSTRAP = f"""
import sys, types
for name in ("agent_loop", "agent_loop.tools", "agent_loop.tools.sandbox"):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [{str(Path(agent_loop.__file__).parent.parent)!r} + "/" + name.replace(".", "/")]
from agent_loop.tools.sandbox.inside.launcher import main
main()
"""
"""Program that imports the launcher without importing the packages above it."""


class Sandbox:
    """Sandbox that runs calls one at a time and keeps state between them. Created by `open_sandbox`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        settings: SandboxSettings,
        work: str,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._timeout_s = settings.time_limit_s + settings.interrupt_grace_s + RESPONSE_TIMEOUT_S
        self._work = work
        self._supervisor: int | None = None
        """Process id of the supervisor, once it has started."""
        self._is_closed = False

    async def wait_until_ready(self) -> None:
        """Wait until the sandbox accepts calls."""
        async with asyncio.timeout(START_TIMEOUT_S):
            ready = await self._receive()
            if ready is None:
                assert self._process.stderr is not None
                output = (await self._process.stderr.read(MAX_STDERR_BYTES)).decode(errors="replace").strip()
                raise SandboxError(
                    f"the sandbox's Python exited during its start; it must be Python 3.11 or newer: {output}"
                )
        if "error" in ready:
            raise SandboxError(f"the sandbox could not be started: {ready['error']}")
        self._supervisor = ready["supervisor"]

    async def run(self, code: str) -> ExecutionResult:
        """Run one call. After a cancellation, the sandbox cannot be used again and must be closed."""
        try:
            async with asyncio.timeout(self._timeout_s):
                self._writer.write(json.dumps({"code": code}).encode() + b"\n")
                await self._writer.drain()
                received = await self._receive()
        except TimeoutError as error:
            raise SandboxError("its supervisor did not respond") from error
        except (OSError, ValueError) as error:
            raise SandboxError(f"its supervisor is broken: {error}") from error
        if received is None:
            raise SandboxError("its supervisor terminated")
        return ExecutionResult(**received)

    async def close(self) -> None:
        """Terminate everything in the sandbox and remove its files. A cancellation does not interrupt it."""
        if not self._is_closed:
            self._is_closed = True
            await run_shielded(self._end, timeout_s=3 * EXIT_TIMEOUT_S)

    async def _receive(self) -> dict[str, Any] | None:
        """Return the next message; None when the other end is closed."""
        line = await self._reader.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    async def _end(self) -> None:
        self._writer.close()
        try:
            try:
                async with asyncio.timeout(EXIT_TIMEOUT_S):
                    await self._process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    os.kill(self._supervisor or self._process.pid, signal.SIGKILL)
                async with asyncio.timeout(EXIT_TIMEOUT_S):
                    await self._process.wait()
        finally:
            await run_in_thread(partial(remove_folder, self._work))


async def open_sandbox(settings: SandboxSettings) -> Sandbox:
    """Start a sandbox and wait until it accepts calls."""
    starting = asyncio.ensure_future(_start_process(settings))
    try:
        sandbox = await asyncio.shield(starting)  # asyncio may lose a process whose creation is cancelled
    except asyncio.CancelledError:
        with suppress(SandboxError):
            await (await starting).close()
        raise
    try:
        await sandbox.wait_until_ready()
    except BaseException as error:
        await sandbox.close()
        if isinstance(error, TimeoutError):
            raise SandboxError("the sandbox did not start in time") from error
        if isinstance(error, (OSError, ValueError, KeyError)):
            raise SandboxError(f"the sandbox could not be started: {error}") from error
        raise
    return sandbox


async def _start_process(settings: SandboxSettings) -> Sandbox:
    command = [settings.resolve_python(), "-s", "-P", "-c", BOOTSTRAP]
    command.append(json.dumps(asdict(settings.spec())))
    try:
        work = tempfile.mkdtemp(prefix="agent-loop-sandbox-")
    except OSError as error:
        raise SandboxError(f"there is no folder for what the sandbox writes: {error}") from error
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *command,
                work,
                stdin=theirs.fileno(),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
    except BaseException as error:
        ours.close()
        remove_folder(work)
        if isinstance(error, OSError):
            raise SandboxError(f"{command[0]} could not be started: {error}") from error
        raise
    reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_MESSAGE_BYTES)
    return Sandbox(process, reader, writer, settings=settings, work=work)

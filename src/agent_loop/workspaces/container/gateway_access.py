"""Access to one service of this process from a container that has no network."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from agent_loop.errors import WorkspaceError
from agent_loop.runtime.threads import run_in_thread
from agent_loop.workspaces.container import namespace_socket

READ_BYTES = 2**16
HELPER_TIMEOUT_S = 30.0


class Forwarder:
    """Forwards the connections of a listening socket to a service, byte for byte."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[Any]] = set()

    async def open(self, listener: socket.socket) -> None:
        """Accept connections of the socket."""
        self._server = await asyncio.start_server(self._forward, sock=listener)

    async def close(self) -> None:
        """Close the socket and all connections."""
        if self._server is not None:
            self._server.close()
        connections = set(self._connections)
        for connection in connections:
            connection.cancel()
        if connections:
            await asyncio.wait(connections)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        writers = [writer]
        try:
            to_reader, to_writer = await asyncio.open_connection(self._host, self._port)
            writers.append(to_writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(reader, to_writer))
                group.create_task(_copy(to_reader, writer))
        except (OSError, BaseExceptionGroup, asyncio.CancelledError):
            pass  # the peer sees that the connection is closed
        finally:
            for each in writers:
                each.close()
            self._connections.discard(connection)


async def open_listener(pid: int, port: int, *, runtime: str) -> socket.socket:
    """Return a socket that listens in the network namespace of a container."""
    try:
        if os.geteuid() == 0:
            return await run_in_thread(_in_own_thread, pid, port)
        if runtime == "podman":
            return await run_in_thread(_by_helper, ["podman", "unshare"], pid, port)
        reason = "only root can"
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(error)
    raise WorkspaceError(
        f"the network namespace of the container cannot be entered: {reason}; run as root, use rootless podman, or set "
        "workspace.container.network to 'host'"
    )


def _in_own_thread(pid: int, port: int) -> socket.socket:
    """Create the socket in a thread that ends afterwards, since it does not return to this process's namespace."""
    result: Future[socket.socket] = Future()

    def create() -> None:
        try:
            result.set_result(namespace_socket.listen_in_namespace(pid, port))
        except BaseException as error:  # noqa: BLE001  (raised in the caller's thread)
            result.set_exception(error)

    thread = threading.Thread(target=create, daemon=True)
    thread.start()
    return result.result(HELPER_TIMEOUT_S)


def _by_helper(command: list[str], pid: int, port: int) -> socket.socket:
    """Create the socket in a program that has the rights, and receive it."""
    program = str(Path(namespace_socket.__file__).resolve())
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            subprocess.run(
                [*command, sys.executable, "-S", program, str(pid), str(port)],
                stdin=theirs.fileno(),
                capture_output=True,
                check=True,
                timeout=HELPER_TIMEOUT_S,
            )
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    if not descriptors:
        raise OSError("the helper program sent no socket")
    return socket.socket(fileno=descriptors[0])


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(READ_BYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()

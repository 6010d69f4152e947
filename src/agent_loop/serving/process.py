"""Runs an application on a port until a signal ends it."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette

from agent_loop.errors import ConfigError
from agent_loop.serving.connections import BoundedConnection

GRACE_S = 5
"""Requests in flight get so long to end by themselves when the application is stopped."""
END_S = 10
"""And so long to end when they are told to."""


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens at an address; port 0 takes a free one.

    Raises:
        ConfigError: The address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(
            f"--host is {host!r}: {error.strerror or error}; give an address of this machine"
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{host}:{port} cannot be had ({error.strerror}); give another --port, or 0 for any that is free"
        ) from error
    return listener


def base_url(listener: socket.socket, *, host: str) -> str:
    """Where clients find the API."""
    port = listener.getsockname()[1]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{reachable}:{port}/v1"


async def run_app(
    app: Starlette, *, listener: socket.socket, tell: Callable[[str], None] | None = None
) -> int | None:
    """Serves until SIGINT or SIGTERM. Requests in flight may end within `GRACE_S`, or until a second signal.

    Args:
        tell: Is given a line at each of the two signals.

    Returns:
        The signal that ended it.
    """
    server = AppServer(app, tell=tell)
    await server.serve(sockets=[listener])
    return server.stopped_by


@asynccontextmanager
async def listening(app: Starlette, *, host: str = "127.0.0.1") -> AsyncGenerator[str]:
    """Serves on a free port meanwhile, beside whatever else the event loop does; no signal is touched.

    Yields:
        Where clients find it, as in `http://127.0.0.1:41234`.

    Raises:
        ConfigError: The address cannot be had.
    """
    server = AppServer(app)
    listener = listening_socket(host, 0)
    try:
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup(sockets=[listener])
        yield base_url(listener, host=host).removesuffix("/v1")
    finally:
        app.state.stopping.set()
        if server.started:
            await server.shutdown(sockets=[listener])
        listener.close()


class AppServer(uvicorn.Server):
    """Uvicorn, as we set it up: `should_exit = True` stops it."""

    stopped_by: int | None = None
    """The signal that did."""

    def __init__(self, app: Starlette, *, tell: Callable[[str], None] | None = None) -> None:
        settings: dict[str, Any] = {
            "log_level": "warning",
            "access_log": False,
            "lifespan": "off",
            "ws": "none",
            "http": BoundedConnection,
            "timeout_graceful_shutdown": GRACE_S + END_S,
        }
        super().__init__(uvicorn.Config(app, **settings))
        self._stopping: asyncio.Event = app.state.stopping
        self._tell: Callable[[str], None] = tell or _say_nothing

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes no more requests, and waits for those in flight."""
        timer = asyncio.get_running_loop().call_later(GRACE_S, self._stopping.set)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Takes SIGINT and SIGTERM meanwhile. Uvicorn's own version raises them again at the end, when what ends with
        the application is still open."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        kinds = (signal.SIGINT, signal.SIGTERM)
        previous = {kind: signal.getsignal(kind) for kind in kinds}
        for kind in kinds:
            loop.add_signal_handler(kind, self._stop, int(kind))
        try:
            yield
        finally:
            for kind in kinds:
                loop.remove_signal_handler(kind)
                signal.signal(kind, previous[kind])

    def _stop(self, kind: int) -> None:
        if self.should_exit:
            self._tell("cutting the requests in flight")
            self._stopping.set()
        else:
            self._tell(f"stopping; requests in flight have {GRACE_S} s, or until Ctrl-C comes again")
        self.should_exit = True
        self.stopped_by = self.stopped_by or kind


def _say_nothing(line: str) -> None:
    """Where nobody is told."""

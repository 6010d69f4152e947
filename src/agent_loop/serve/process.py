"""Runs an HTTP application on a port until a signal stops it."""

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

GRACE_S = 5
"""Time that in-flight requests have to finish when the application stops, before they are aborted."""
END_S = 10
"""Time that aborted requests have to end."""


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address; port 0 takes a free port."""
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
            f"{host}:{port} is not available ({error.strerror}); give another --port, or 0 for any free port"
        ) from error
    return listener


def base_url(listener: socket.socket, *, host: str) -> str:
    """Return the base URL of the API."""
    port = listener.getsockname()[1]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{reachable}:{port}/v1"


async def run_app(
    app: Starlette, *, listener: socket.socket, report: Callable[[str], None] | None = None
) -> int | None:
    """Serve until SIGINT or SIGTERM, and return that signal.

    In-flight requests may finish within `GRACE_S` seconds. They are aborted after that time or at a second signal.
    """
    server = AppServer(app, report=report)
    await server.serve(sockets=[listener])
    return server.stopped_by


@asynccontextmanager
async def listening(app: Starlette, *, host: str = "127.0.0.1") -> AsyncGenerator[str]:
    """Serve on a free port until exit, in the running event loop, and yield the URL."""
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
    """Uvicorn server with our settings. Set `should_exit = True` to stop it."""

    stopped_by: int | None = None
    """Signal that stopped the server."""

    def __init__(self, app: Starlette, *, report: Callable[[str], None] | None = None) -> None:
        settings: dict[str, Any] = {
            "log_level": "warning",
            "access_log": False,
            "lifespan": "off",
            "ws": "none",
            "http": "h11",
            "timeout_graceful_shutdown": GRACE_S + END_S,
        }
        super().__init__(uvicorn.Config(app, **settings))
        self._stopping: asyncio.Event = app.state.stopping
        self._report: Callable[[str], None] = report or (lambda _: None)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting requests, and wait for in-flight requests."""
        timer = asyncio.get_running_loop().call_later(GRACE_S, self._stopping.set)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Handle SIGINT and SIGTERM until exit.

        Uvicorn's own version raises the signals again on exit, before the resources around the application are closed.
        """
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
            self._report("aborting in-flight requests")
            self._stopping.set()
        else:
            self._report(f"stopping; in-flight requests have {GRACE_S} s to finish; Ctrl-C again aborts them")
        self.should_exit = True
        self.stopped_by = self.stopped_by or kind

"""`agent-loop view`: serves the page of a run until a signal arrives."""

from __future__ import annotations

import asyncio
import socket
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from agent_loop.errors import ConfigError
from agent_loop.serve.middleware import answered_hosts
from agent_loop.serve.process import base_url, listening_socket, run_app
from agent_loop.viewer.app import create_collection_app, create_viewer_app
from agent_loop.viewer.collection import RunCollection
from agent_loop.viewer.forks import Forks
from agent_loop.viewer.source import RunSource

FIRST_PORT = 7321
PORTS_TRIED = 20


def view(
    path: Path,
    *,
    host: str,
    port: int | None,
    opens_browser: bool,
    console: Console,
    server: str | None = None,
) -> int | None:
    """Serve the page of a run until a signal arrives, and return the signal's number.

    Args:
        path: Folder of the run, a folder of Parquet files, or one Parquet file.
        host: Address to listen at.
        port: Port to listen at. None tries ports from `FIRST_PORT` on; 0 takes any free port.
        opens_browser: Whether to open the page in a browser.
        console: Receives the address of the page.
        server: Server for forks of trajectories; see `Forks`.
    """
    source = RunSource(path)
    forks = Forks(source, server=server, host=host)
    with free_listener(host, port) as listener:
        _announce(f"{path}", listener, host=host, opens_browser=opens_browser, console=console)

        async def serve() -> int | None:  # the lock of the forks belongs to the event loop
            app = create_viewer_app(source, hosts=answered_hosts(host), forks=forks)
            return await run_app(app, listener=listener)

        return asyncio.run(serve())


def view_collection(
    paths: Sequence[Path], *, host: str, port: int | None, opens_browser: bool, console: Console
) -> int | None:
    """Serve a page of several runs, as `view` does."""
    collection = RunCollection(paths)
    num_runs = len(collection.runs()["runs"])  # reads what the first page requests first
    with free_listener(host, port) as listener:
        named = "1 run" if num_runs == 1 else f"{num_runs} runs"
        _announce(named, listener, host=host, opens_browser=opens_browser, console=console)
        app = create_collection_app(collection, hosts=answered_hosts(host))
        return asyncio.run(run_app(app, listener=listener))


def _announce(
    name: str, listener: socket.socket, *, host: str, opens_browser: bool, console: Console
) -> None:
    """Print the address of the page, and open it in a graphical browser, if there is one.

    A text browser would take over the terminal.
    """
    url = base_url(listener, host=host).removesuffix("v1")
    console.print(f"{name} at [bold]{url}[/]", highlight=False, soft_wrap=True)
    console.print("Ctrl-C stops the viewer; runs continue.", highlight=False)
    if opens_browser:
        with suppress(webbrowser.Error):
            browser = webbrowser.get()
            if type(browser) is not webbrowser.GenericBrowser:
                browser.open(url)


def free_listener(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens at a port, or at the first free port from `FIRST_PORT` on."""
    if port is not None:
        return listening_socket(host, port)
    for candidate in range(FIRST_PORT, FIRST_PORT + PORTS_TRIED - 1):
        try:
            return listening_socket(host, candidate)
        except ConfigError:
            continue
    return listening_socket(host, FIRST_PORT + PORTS_TRIED - 1)

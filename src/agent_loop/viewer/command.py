"""`agent-loop view`: serves the page of a run until a signal arrives."""

from __future__ import annotations

import asyncio
import socket
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
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
    paths: Sequence[Path],
    *,
    host: str,
    port: int | None,
    opens_browser: bool,
    console: Console,
    are_several: bool,
    server: str | None = None,
) -> int | None:
    """Serve the page of a run, or of several, until a signal arrives, and return the signal's number.

    Args:
        paths: Folders of runs, folders of Parquet files, or Parquet files.
        host: Address to listen at.
        port: Port to listen at. None tries ports from `FIRST_PORT` on; 0 takes any free port.
        opens_browser: Whether to open the page in a browser.
        console: Receives the address of the page.
        are_several: Whether to show a list of runs. Otherwise there is one path.
        server: Server for forks of trajectories; see `Forks`.
    """
    if are_several:
        collection = RunCollection(paths)
        num_runs = len(collection.folders())
        name = "1 run" if num_runs == 1 else f"{num_runs} runs"
        make_app = partial(create_collection_app, collection)
    else:
        source, name = RunSource(paths[0]), str(paths[0])
        make_app = partial(create_viewer_app, source, forks=Forks(source, server=server, host=host))
    with free_listener(host, port) as listener:
        url = base_url(listener, host=host).removesuffix("v1")
        console.print(f"{name} at [bold]{url}[/]", highlight=False, soft_wrap=True)
        console.print("Ctrl-C stops the viewer; runs continue.", highlight=False)
        if opens_browser:
            _open(url)
        return asyncio.run(run_app(make_app(hosts=answered_hosts(host)), listener=listener))


def _open(url: str) -> None:
    """Open a page in a graphical browser, if there is one. A text browser would take over the terminal."""
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

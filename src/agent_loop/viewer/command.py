"""Serves the page of a run until a signal comes."""

from __future__ import annotations

import asyncio
import socket
import webbrowser
from pathlib import Path

from rich.console import Console

from agent_loop.errors import ConfigError
from agent_loop.serving.hosts import answered_hosts
from agent_loop.serving.process import base_url, listening_socket, run_app
from agent_loop.viewer.app import create_viewer_app
from agent_loop.viewer.source import RunSource

FIRST_PORT = 7321
PORTS_TRIED = 20


def view(path: Path, *, host: str, port: int | None, opens_browser: bool, console: Console) -> int | None:
    """Shows a run until a signal comes, which is returned.

    Args:
        port: None takes the first free one from `FIRST_PORT` on; 0 takes any.

    Raises:
        DataError: There is no such run.
        ConfigError: The address is not available.
    """
    source = RunSource(path)
    source.warm_up()
    hosts = answered_hosts(host)
    with free_listener(host, port) as listener:
        url = base_url(listener, host=host).removesuffix("v1")
        console.print(f"{path} at [bold]{url}[/]", highlight=False, soft_wrap=True)
        console.print("Ctrl-C stops it; the run does not notice.", highlight=False)
        if opens_browser:
            _open(url)
        return asyncio.run(_serve(source, listener=listener, hosts=hosts))


async def _serve(source: RunSource, *, listener: socket.socket, hosts: frozenset[str] | None) -> int | None:
    return await run_app(create_viewer_app(source, hosts=hosts), listener=listener)


def free_listener(host: str, port: int | None) -> socket.socket:
    """Listens at a port, or at the first free one from `FIRST_PORT` on.

    Raises:
        ConfigError: It is taken, or all of those that were tried are.
    """
    if port is not None:
        return listening_socket(host, port)
    for candidate in range(FIRST_PORT, FIRST_PORT + PORTS_TRIED - 1):
        try:
            return listening_socket(host, candidate)
        except ConfigError:
            continue
    return listening_socket(host, FIRST_PORT + PORTS_TRIED - 1)


def _open(url: str) -> None:
    """In a browser with windows, if there is one; one in the terminal would take the terminal."""
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return
    if type(browser) is not webbrowser.GenericBrowser:
        browser.open(url)

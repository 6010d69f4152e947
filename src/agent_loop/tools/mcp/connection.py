"""Connections to MCP servers with the official SDK, which is an optional dependency."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache
from importlib import import_module
from typing import Any, cast

from agent_loop.errors import ConfigError
from agent_loop.runtime.describe import describe_error
from agent_loop.tools.environment_variables import expand_variables
from agent_loop.tools.mcp.config import McpServer

CONNECT_TIMEOUT_S = 30.0
CONNECTION_CLOSED = -32000
"""The SDK's error code for a request whose connection closed before the response. Many servers use the same code for
their own errors."""


def import_mcp() -> Any:
    """Import the SDK.

    Raises:
        ConfigError: The SDK is not installed.
    """
    try:
        return import_module("mcp")
    except ImportError as error:
        raise ConfigError('the tools mcp need the package mcp: pip install "agent-loop[mcp]"') from error


def open_client(server: McpServer, *, where: str) -> AbstractAsyncContextManager[Any]:
    """Return a client of a server, to be opened with `async with`.

    A server given by `command` is started with the client, and terminated with all its child processes.

    Raises:
        ConfigError: The SDK is not installed, or an environment variable is not set.
    """
    mcp = import_mcp()
    if server.command is None:
        return _without_output_checks(mcp.Client(_http_transport(server, where=where)))
    env = expand_variables(server.env, where=f"{where}: env")
    parameters = mcp.StdioServerParameters(command=server.command, args=server.args, env=env, cwd=server.cwd)
    return _without_output_checks(mcp.Client(parameters))


@asynccontextmanager
async def _without_output_checks(client: Any) -> AsyncGenerator[Any]:
    """Open a client that does not validate results against the output schemas of the server.

    The SDK validates on the event loop, with regular expressions of the server that may backtrack without limit.
    Nothing depends on the validation, since the model reads the result unchanged.
    """
    async with client as opened:
        opened.session.validate_tool_result = _accept
        yield opened


async def _accept(name: str, result: Any) -> None:
    pass


async def list_tools(client: Any) -> list[Any]:
    """Return all tools of a server, from all pages."""
    tools: list[Any] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            return tools


def describe_cause(error: BaseException) -> str:
    """Return the cause of a failed connection, which the SDK wraps in exception groups."""
    if isinstance(error, BaseExceptionGroup):
        return describe_cause(cast("BaseExceptionGroup[BaseException]", error).exceptions[0])
    return describe_error(error)


async def is_responding(client: Any, *, after: Any) -> bool:
    """Return whether a server still responds after an `MCPError`."""
    if after.error.code != CONNECTION_CLOSED:
        return True
    try:
        await client.list_tools()
    except import_mcp().MCPError as error:
        return error.error.code != CONNECTION_CLOSED
    return True


def _http_transport(server: McpServer, *, where: str) -> AbstractAsyncContextManager[Any]:
    headers = expand_variables(server.headers, where=f"{where}: headers")
    if server.auth_token is not None:
        token = expand_variables({"auth_token": server.auth_token}, where=where)["auth_token"]
        headers["Authorization"] = f"Bearer {token}"
    return _streams(str(server.url), headers)


@cache
def _certificates() -> ssl.SSLContext:
    """Load the certificates once, since loading takes longer than opening a session."""
    return ssl.create_default_context()


@asynccontextmanager
async def _streams(url: str, headers: dict[str, str]) -> AsyncGenerator[Any]:
    httpx: Any = import_module("httpx2")  # the SDK's own dependency
    transport: Any = import_module("mcp.client.streamable_http")
    timeout = httpx.Timeout(CONNECT_TIMEOUT_S, read=None)  # a call's time limit is the tool's
    async with (
        httpx.AsyncClient(headers=headers, timeout=timeout, verify=_certificates()) as http,
        transport.streamable_http_client(url, http_client=http) as streams,
    ):
        yield streams

"""Opens an MCP server with the official SDK, which is an optional dependency."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache
from importlib import import_module
from typing import Any, cast

from agent_loop.errors import ConfigError
from agent_loop.runtime.boundary import describe_error
from agent_loop.tools.environment import from_environment
from agent_loop.tools.mcp.config import McpServer

CONNECT_TIMEOUT_S = 30.0
CONNECTION_CLOSED = -32000
"""The SDK's code for a request whose connection ended before its answer, and that of many servers for what went wrong
in them."""


def import_mcp() -> Any:
    """Raises: ConfigError: The SDK is not installed."""
    try:
        return import_module("mcp")
    except ImportError as error:
        raise ConfigError('the tools mcp need the package mcp: pip install "agent-loop[mcp]"') from error


def open_client(server: McpServer, *, where: str) -> AbstractAsyncContextManager[Any]:
    """A client of the server, for `async with`; a program is started, and ended with all that it started.

    Raises:
        ConfigError: The SDK is not installed, or an environment variable is not set.
    """
    mcp = import_mcp()
    if server.command is None:
        return _without_output_checks(mcp.Client(_http_transport(server, where=where)))
    env = from_environment(server.env, where=f"{where}: env")
    parameters = mcp.StdioServerParameters(command=server.command, args=server.args, env=env, cwd=server.cwd)
    return _without_output_checks(mcp.Client(parameters))


@asynccontextmanager
async def _without_output_checks(client: Any) -> AsyncGenerator[Any]:
    """Open a client that does not hold a tool's answer against the output schema that its server declares.

    The SDK does so on the event loop, with regular expressions of the server that may backtrack for ever. Nothing here
    relies on the outcome: the model reads the answer as it is.
    """
    async with client as opened:
        opened.session.validate_tool_result = _accept
        yield opened


async def _accept(name: str, result: Any) -> None:
    pass


async def list_tools(client: Any) -> list[Any]:
    """All tools of a server, page by page."""
    tools: list[Any] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            return tools


def describe_cause(error: BaseException) -> str:
    """What broke a connection; the SDK's task groups wrap it."""
    if isinstance(error, BaseExceptionGroup):
        return describe_cause(cast("BaseExceptionGroup[BaseException]", error).exceptions[0])
    return describe_error(error)


async def answers(client: Any, *, after: Any) -> bool:
    """Whether a server still answers after an `MCPError`."""
    if after.error.code != CONNECTION_CLOSED:
        return True
    try:
        await client.list_tools()
    except import_mcp().MCPError as error:
        return error.error.code != CONNECTION_CLOSED
    return True


def _http_transport(server: McpServer, *, where: str) -> AbstractAsyncContextManager[Any]:
    headers = from_environment(server.headers, where=f"{where}: headers")
    if server.auth_token is not None:
        token = from_environment({"auth_token": server.auth_token}, where=where)["auth_token"]
        headers["Authorization"] = f"Bearer {token}"
    return _streams(str(server.url), headers)


@cache
def _certificates() -> ssl.SSLContext:
    """Reading them takes longer than opening a session."""
    return ssl.create_default_context()


@asynccontextmanager
async def _streams(url: str, headers: dict[str, str]) -> AsyncGenerator[Any]:
    httpx: Any = import_module("httpx2")  # what the SDK is built on
    transport: Any = import_module("mcp.client.streamable_http")
    timeout = httpx.Timeout(CONNECT_TIMEOUT_S, read=None)  # a call's time limit is the tool's
    async with (
        httpx.AsyncClient(headers=headers, timeout=timeout, verify=_certificates()) as http,
        transport.streamable_http_client(url, http_client=http) as streams,
    ):
        yield streams

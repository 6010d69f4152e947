"""Connections to MCP servers with the official SDK, an optional dependency, and sessions with their broken ones."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, cast

from pydantic import Field, ValidationError

from agent_loop.config import Section
from agent_loop.errors import ConfigError, ToolError, ToolUnavailable
from agent_loop.runtime.concurrency import HeldOpen, run_while
from agent_loop.runtime.describe import describe_error
from agent_loop.tools.base import trajectory_of
from agent_loop.tools.registry import expand_variables

CONNECT_TIMEOUT_S = 30.0
CONNECTION_CLOSED = -32000
"""The SDK's error code for a request whose connection closed before the response. Many servers use the same code for
their own errors."""


class McpServer(Section):
    """Address of a server: `command` for a server that is started as a child process, or `url`."""

    command: str | None = None
    """Program that implements MCP on its standard input and output."""
    args: list[str] = Field(default=[])
    env: dict[str, str] = Field(default={})
    """Environment variables of the program, in addition to a few safe ones; `$NAME` is a variable of this process."""
    cwd: str | None = None
    url: str | None = None
    """URL of a server that implements streamable HTTP."""
    headers: dict[str, str] = Field(default={})
    """Headers of every request; `$NAME` is an environment variable."""
    auth_token: str | None = None
    """Sent as a bearer token; `$NAME` is an environment variable."""


def import_mcp() -> Any:
    """Import the SDK."""
    try:
        return import_module("mcp")
    except ImportError as error:
        raise ConfigError('the tools mcp need the package mcp: pip install "agent-loop[mcp]"') from error


def open_client(server: McpServer, *, where: str) -> AbstractAsyncContextManager[Any]:
    """Return a client of a server, to be opened with `async with`.

    A server given by `command` is started with the client, and terminated with all its child processes.
    """
    mcp = import_mcp()
    if server.command is not None:
        env = expand_variables(server.env, where=f"{where}: env")
        target = mcp.StdioServerParameters(command=server.command, args=server.args, env=env, cwd=server.cwd)
    else:
        headers = expand_variables(server.headers, where=f"{where}: headers")
        if server.auth_token is not None:
            token = expand_variables({"auth_token": server.auth_token}, where=where)["auth_token"]
            headers["Authorization"] = f"Bearer {token}"
        target = _streams(str(server.url), headers)
    return _without_output_checks(mcp.Client(target))


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
    page = await client.list_tools()
    tools = list[Any](page.tools)
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
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


class McpSession:
    """Session with an MCP server.

    Args:
        open_as: Returns a new client, to be opened with `async with`.
        reconnects: Number of times a broken session is reopened.
    """

    def __init__(self, open_as: Callable[[], AbstractAsyncContextManager[Any]], *, reconnects: int) -> None:
        self._open_as = open_as
        self._reconnects_left = reconnects
        self._held: HeldOpen[Any] | None = None
        self._client: Any = None
        self._is_broken = False
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        """Open the session."""
        self._held = HeldOpen(self._open_as())
        try:
            self._client = await self._held.open()
        except asyncio.CancelledError:
            await self._held.close()
            raise
        except Exception as error:
            self._is_broken = True
            raise ToolUnavailable(f"the MCP server could not be reached: {describe_cause(error)}") from error
        self._is_broken = False

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call a tool of the server and return its `CallToolResult`."""
        held, client = await self._working()
        try:
            result = await run_while(client.call_tool(name, dict(arguments)), condition=held.closed())
        except import_mcp().MCPError as error:
            if await is_responding(client, after=error):
                raise ToolError(f"the MCP server rejected the call: {error.error.message}") from error
            result = None
        except (ValidationError, RuntimeError) as error:  # the SDK's, for a response that violates its schema
            raise ToolError(f"the MCP server returned an invalid result: {describe_error(error)}") from error
        if result is None:
            self._is_broken = self._is_broken or held is self._held
            raise ToolUnavailable("the MCP server ended the session during the call")
        return result

    async def close(self) -> None:
        """Close the session, and terminate the server if it was started for the session."""
        if self._held is not None:
            await self._held.close()

    async def _working(self) -> tuple[HeldOpen[Any], Any]:
        """Return the open session, and reopen it first if it broke."""
        async with self._lock:
            assert self._held is not None
            if self._is_broken or self._held.is_closed:
                if self._reconnects_left == 0:
                    raise ToolUnavailable("the MCP server has ended the session")
                self._reconnects_left -= 1
                self._is_broken = True
                await self._held.close()
                await self.open()
            return self._held, self._client


class McpSessions:
    """Sessions with one server: one per trajectory, or one for all."""

    def __init__(
        self, open_as: Callable[[], AbstractAsyncContextManager[Any]], *, is_shared: bool, reconnects: int
    ) -> None:
        self._open_as = open_as
        self._is_shared = is_shared
        self._reconnects = reconnects
        self._shared: dict[Any, _SharedSession] = {}

    async def acquire(self, instance_id: str) -> McpSession:
        """Return the session of a tool's instance, and open it first if needed. Call `release` in any case."""
        shared = self._shared.setdefault(self._key(instance_id), _SharedSession())
        shared.users.add(instance_id)
        async with shared.lock:
            if shared.session is None:
                session = McpSession(self._open_as, reconnects=self._reconnects)
                await session.open()
                shared.session = session
            return shared.session

    async def release(self, instance_id: str) -> None:
        """Release the session, and close it after its last instance."""
        key = self._key(instance_id)
        shared = self._shared.get(key)
        if shared is None:
            return
        shared.users.discard(instance_id)
        async with shared.lock:
            if not shared.users:
                self._shared.pop(key, None)
                session, shared.session = shared.session, None
                if session is not None:
                    await session.close()

    def _key(self, instance_id: str) -> Any:
        """Return what the users of a session have in common. A session belongs to one event loop."""
        return asyncio.get_running_loop(), "" if self._is_shared else trajectory_of(instance_id)


@dataclass(slots=True)
class _SharedSession:
    users: set[str] = field(default_factory=set[str])
    session: McpSession | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

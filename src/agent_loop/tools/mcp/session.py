"""Sessions with an MCP server: their owners, and the handling of broken sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from pydantic import ValidationError

from agent_loop.errors import ToolError, ToolUnavailable
from agent_loop.runtime.concurrency import HeldOpen, run_while
from agent_loop.runtime.describe import describe_error
from agent_loop.tools.base import trajectory_of
from agent_loop.tools.mcp.connection import describe_cause, import_mcp, is_responding
from agent_loop.tools.shared_resource import SharedResource


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
        """Open the session.

        Raises:
            ToolUnavailable: The server cannot be reached or started.
        """
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
        """Call a tool of the server and return its `CallToolResult`.

        Raises:
            ToolUnavailable: The session broke during this call or before, and was not reopened.
            ToolError: The server rejected the call, or returned an invalid result.
        """
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
    """Sessions with one server: one per trajectory, or one for all.

    Args:
        open_as: Returns a new client, to be opened with `async with`.
        is_shared: Whether one session serves all trajectories.
        reconnects: Number of times a broken session is reopened.
    """

    def __init__(
        self, open_as: Callable[[], AbstractAsyncContextManager[Any]], *, is_shared: bool, reconnects: int
    ) -> None:
        self._open_as = open_as
        self._is_shared = is_shared
        self._reconnects = reconnects
        self._sessions: dict[str, SharedResource[McpSession]] = {}

    async def acquire(self, instance_id: str) -> McpSession:
        """Return the session of a tool's instance, and open it first if needed.

        Raises:
            ToolUnavailable: The server cannot be reached or started.
        """
        shared = self._sessions.setdefault(
            self._key(instance_id), SharedResource(self._open, close_as=McpSession.close)
        )
        return await shared.acquire(instance_id)

    async def release(self, instance_id: str) -> None:
        """Release the session, and close it after its last instance."""
        key = self._key(instance_id)
        shared = self._sessions.get(key)
        if shared is not None:
            try:
                await shared.release(instance_id)
            finally:
                if not shared.num_users and not self._is_shared:
                    self._sessions.pop(key, None)

    async def _open(self) -> McpSession:
        session = McpSession(self._open_as, reconnects=self._reconnects)
        await session.open()
        return session

    def _key(self, instance_id: str) -> str:
        return "" if self._is_shared else trajectory_of(instance_id)

"""Sessions with an MCP server: whose they are, and what becomes of one that breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from pydantic import ValidationError

from agent_loop.errors import ToolError, ToolUnavailable
from agent_loop.runtime.boundary import describe_error
from agent_loop.runtime.concurrency import HeldOpen, run_while
from agent_loop.tools.base import trajectory_of
from agent_loop.tools.mcp.connection import answers, describe_cause, import_mcp
from agent_loop.tools.shared import Shared


class McpSession:
    """One session.

    Args:
        open_as: Makes a new client, for `async with`.
        reconnects: How often a session that broke is opened anew.
    """

    def __init__(self, open_as: Callable[[], AbstractAsyncContextManager[Any]], *, reconnects: int) -> None:
        self._open_as = open_as
        self._reconnects_left = reconnects
        self._held: HeldOpen[Any] | None = None
        self._client: Any = None
        self._is_broken = False
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        """Raises: ToolUnavailable: The server cannot be reached or started."""
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
        """The `CallToolResult` of one call.

        Raises:
            ToolUnavailable: The session broke, now or before, and was not opened anew.
            ToolError: The server refused the call, or answered something that is no result of it.
        """
        held, client = await self._working()
        try:
            result = await run_while(client.call_tool(name, dict(arguments)), condition=held.over())
        except import_mcp().MCPError as error:
            if await answers(client, after=error):
                raise ToolError(f"the MCP server refused the call: {error.error.message}") from error
            result = None
        except (ValidationError, RuntimeError) as error:  # the SDK's, of an answer against its own schema
            raise ToolError(f"the MCP server answered what is no result: {describe_error(error)}") from error
        if result is None:
            self._is_broken = self._is_broken or held is self._held
            raise ToolUnavailable("the MCP server ended the session during the call")
        return result

    async def close(self) -> None:
        """Ends the session, and the server if it was started for it."""
        if self._held is not None:
            await self._held.close()

    async def _working(self) -> tuple[HeldOpen[Any], Any]:
        """The session, opened anew if it broke."""
        async with self._lock:
            assert self._held is not None
            if self._is_broken or self._held.is_over:
                if self._reconnects_left == 0:
                    raise ToolUnavailable("the MCP server has ended the session")
                self._reconnects_left -= 1
                self._is_broken = True
                await self._held.close()
                await self.open()
            return self._held, self._client


class McpSessions:
    """The sessions of one server: one for each trajectory, or one for all.

    Args:
        open_as: Makes a new client, for `async with`.
        is_shared: One session serves all trajectories.
        reconnects: As `McpSession` has it.
    """

    def __init__(
        self, open_as: Callable[[], AbstractAsyncContextManager[Any]], *, is_shared: bool, reconnects: int
    ) -> None:
        self._open_as = open_as
        self._is_shared = is_shared
        self._reconnects = reconnects
        self._sessions: dict[str, Shared[McpSession]] = {}

    async def join(self, instance_id: str) -> McpSession:
        """The session of a tool's instance, opened for the first one that needs it.

        Raises:
            ToolUnavailable: The server cannot be reached or started.
        """
        shared = self._sessions.setdefault(
            self._key(instance_id), Shared(self._open, close_as=McpSession.close)
        )
        return await shared.join(instance_id)

    async def leave(self, instance_id: str) -> None:
        """The last instance to leave ends the session."""
        key = self._key(instance_id)
        shared = self._sessions.get(key)
        if shared is not None:
            try:
                await shared.leave(instance_id)
            finally:
                if not shared.num_users and not self._is_shared:
                    self._sessions.pop(key, None)

    async def _open(self) -> McpSession:
        session = McpSession(self._open_as, reconnects=self._reconnects)
        await session.open()
        return session

    def _key(self, instance_id: str) -> str:
        return "" if self._is_shared else trajectory_of(instance_id)

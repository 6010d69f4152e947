"""Tools of MCP servers, discovered when the configuration is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from agent_loop.errors import ConfigError, ToolError, did_you_mean
from agent_loop.runtime.instances import OnReplay
from agent_loop.runtime.isolated_task import DeadlineExpired
from agent_loop.runtime.user_code import run_bounded
from agent_loop.tools.base import BaseTool, ToolResponse
from agent_loop.tools.mcp.config import McpConfig, McpServer, read_servers
from agent_loop.tools.mcp.connection import describe_cause, list_tools, open_client
from agent_loop.tools.mcp.content import as_response
from agent_loop.tools.mcp.session import McpSessions

SHARED_RECONNECTS = 3


class McpTool(BaseTool):
    """Tool of an MCP server.

    A call of a tool that declares `readOnlyHint` may be executed twice. A trajectory that called any other tool
    restarts after a crash, unless the entry in the registry sets `on_replay`.
    """

    def __init__(self, offered: Any, *, sessions: McpSessions, settings: McpConfig) -> None:
        function = {
            "name": settings.prefix + offered.name,
            "description": offered.description or "",
            "parameters": offered.input_schema,
        }
        super().__init__({}, {"type": "function", "function": function})
        only_reads = offered.annotations is not None and offered.annotations.read_only_hint
        self.on_replay = OnReplay.RECORDED if only_reads else OnReplay.RESTART
        self.timeout_s, self.max_concurrent = settings.timeout, settings.rate_limit
        self._name_there = str(offered.name)
        self._sessions = sessions
        self._images = settings.images

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        """Open the session of the trajectory, or the shared session.

        Raises:
            ToolUnavailable: The server cannot be reached or started.
        """
        await self._sessions.acquire(instance_id)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Call the server's tool.

        Raises:
            ToolUnavailable: The session broke.
            ToolError: The tool reported an error, or the server rejected the call.
        """
        session = await self._sessions.acquire(instance_id)
        result = await session.call(self._name_there, parameters)
        response = as_response(result, images=self._images)
        if result.is_error:
            raise ToolError(response.text or f"{self.name} failed")
        return response, None, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await self._sessions.release(instance_id)


def mcp_tools(config: Mapping[str, Any]) -> list[BaseTool]:
    """Return a tool for each selected tool of the servers. Each server is opened once, to list its tools.

    Raises:
        ConfigError: A server cannot be reached, or no server offers a selected tool.
    """
    settings, servers = read_servers(config)
    tools: list[BaseTool] = []
    offered_names: list[str] = []
    for name, server in servers.items():
        offered = _discover(server, timeout_s=settings.start_timeout_s, where=name)
        offered_names += [tool.name for tool in offered]
        sessions = _sessions(settings, server, where=name)
        tools += [
            McpTool(tool, sessions=sessions, settings=settings)
            for tool in offered
            if settings.tool_selected_list is None or tool.name in settings.tool_selected_list
        ]
    for name in settings.tool_selected_list or ():
        if name not in offered_names:
            raise ConfigError(
                f"tool_selected_list: no server offers {name!r}{did_you_mean(name, offered_names)}"
            )
    return tools


def _sessions(settings: McpConfig, server: McpServer, *, where: str) -> McpSessions:
    is_shared = settings.session == "shared"
    reconnects = settings.reconnects
    if reconnects is None:
        reconnects = SHARED_RECONNECTS if is_shared else 0
    return McpSessions(partial(open_client, server, where=where), is_shared=is_shared, reconnects=reconnects)


def _discover(server: McpServer, *, timeout_s: float, where: str) -> Sequence[Any]:
    """Return the tools of a server. This uses a thread, since an event loop may be running in the current one."""

    async def ask() -> Sequence[Any]:
        async with open_client(server, where=where) as client:
            return await list_tools(client)

    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(asyncio.run, run_bounded(ask, timeout_s=timeout_s)).result()
        except ConfigError:
            raise
        except DeadlineExpired as error:
            raise ConfigError(f"{where}: listing the tools of the MCP server {error}") from error
        except Exception as error:
            raise ConfigError(
                f"{where}: the tools of the MCP server cannot be listed: {describe_cause(error)}"
            ) from error

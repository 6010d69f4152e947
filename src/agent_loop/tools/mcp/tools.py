"""The tools `mcp`: configuration of servers, tools, and conversion of results."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from agent_loop.config import NotNegative, Positive, PositiveSeconds, parse_section
from agent_loop.errors import ConfigError, ToolError, did_you_mean
from agent_loop.files.plain_values import parse_json, shown
from agent_loop.runtime.instances import OnReplay
from agent_loop.runtime.isolated_task import DeadlineExpired
from agent_loop.runtime.user_code import run_bounded
from agent_loop.tools.base import BaseTool, ToolResponse
from agent_loop.tools.mcp.session import McpServer, McpSessions, describe_cause, list_tools, open_client


class McpConfig(McpServer):
    """A server, or a file with several servers, and the selection of their tools."""

    mcp_servers_config_path: str | None = None
    """JSON file: `{"mcpServers": {name: {command, args, env, cwd} or {url, headers, auth_token}}}`."""
    tool_selected_list: list[str] | None = None
    """Tools to use, by the server's names; None for all."""
    prefix: str = ""
    """Prefix of the names by which models call the tools."""
    session: Literal["trajectory", "shared"] = "trajectory"
    """`trajectory` opens a session per trajectory, which isolates them; `shared` opens one per process."""
    reconnects: NotNegative | None = None
    """Number of times a broken session is reopened; the server's state of the session is lost. None means 0 for the
    session of a trajectory and 3 for a shared session."""
    start_timeout_s: PositiveSeconds = 60.0
    """Seconds for starting the server and listing its tools, before the first rollout."""
    images: bool = True
    """Whether to pass images to the model. If false, a line of text stands in for each."""
    timeout: PositiveSeconds | None = None
    """verl's name for the tools' `timeout_s`."""
    rate_limit: Positive | None = None
    """verl's name for the tools' `max_concurrent`."""


def read_servers(config: Mapping[str, Any]) -> tuple[McpConfig, dict[str, McpServer]]:
    """Return the settings, and the servers by name."""
    where = "the config of mcp"
    settings = parse_section(McpConfig, config, where=where)
    if settings.mcp_servers_config_path is None:
        servers = {where: McpServer(**{key: getattr(settings, key) for key in McpServer.model_fields})}
    else:
        servers = _read_file(Path(settings.mcp_servers_config_path))
    for name, server in servers.items():
        if (server.command is None) == (server.url is None):
            raise ConfigError(f"{name}: give exactly one of command and url")
    return settings, servers


def _read_file(path: Path) -> dict[str, McpServer]:
    try:
        content: Any = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"mcp_servers_config_path: {str(path)!r} cannot be read: {error}") from error
    named: Any = cast(dict[str, Any], content).get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(named, dict) or not named:
        raise ConfigError(f'{path} lists no servers; write {{"mcpServers": {{"name": {{"url": "..."}}}}}}')
    for name, server in cast(dict[str, Any], named).items():
        if not isinstance(server, dict):
            raise ConfigError(
                f"{path}: mcpServers.{name} is {shown(server)}; give keys, such as url or command"
            )
    return {
        name: parse_section(McpServer, server, where=f"{path}: mcpServers.{name}")
        for name, server in cast(dict[str, Any], named).items()
    }


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
        """Open the session of the trajectory, or the shared session."""
        await self._sessions.acquire(instance_id)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Call the server's tool."""
        session = await self._sessions.acquire(instance_id)
        result = await session.call(self._name_there, parameters)
        response = as_response(result, images=self._images)
        if result.is_error:
            raise ToolError(response.text or f"{self.name} failed")
        return response, None, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await self._sessions.release(instance_id)


def mcp_tools(config: Mapping[str, Any]) -> list[BaseTool]:
    """Return a tool for each selected tool of the servers. Each server is opened once, to list its tools."""
    settings, servers = read_servers(config)
    tools: list[BaseTool] = []
    offered_names: list[str] = []
    for name, server in servers.items():
        offered = _discover(server, timeout_s=settings.start_timeout_s, where=name)
        offered_names += [tool.name for tool in offered]
        is_shared = settings.session == "shared"
        reconnects = settings.reconnects
        if reconnects is None:
            reconnects = SHARED_RECONNECTS if is_shared else 0
        connect = partial(open_client, server, where=name)
        sessions = McpSessions(connect, is_shared=is_shared, reconnects=reconnects)
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


def as_response(result: Any, *, images: bool) -> ToolResponse:
    """Convert an MCP result to a tool response.

    Texts and embedded texts are joined, and images are attached. Any other content becomes a line of text that
    describes it.
    """
    texts: list[str] = []
    pictures: list[Any] = []
    for block in result.content:
        if block.type == "image" and images:
            pictures.append(f"data:{block.mime_type};base64,{block.data}")
        else:
            texts.append(_text_of(block))
    if not result.content and result.structured_content is not None:
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return ToolResponse(text="\n".join(texts), image=pictures or None)


def _text_of(block: Any) -> str:
    if block.type == "text":
        return block.text
    if block.type == "resource":
        resource = block.resource
        text = getattr(resource, "text", None)
        kind = resource.mime_type or "of unknown type"
        return f"[resource {resource.uri}, {kind}, not shown]" if text is None else text
    if block.type == "resource_link":
        described = f": {block.description}" if block.description else ""
        return f"[resource {block.uri} {block.name!r}{described}]"
    return f"[{block.type}, {block.mime_type or 'of unknown type'}, not shown]"

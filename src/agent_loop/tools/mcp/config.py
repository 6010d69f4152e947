"""Which MCP servers there are, and what is used of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import Field

from agent_loop.config import NotNegative, Positive, PositiveSeconds, Section, parse_section
from agent_loop.errors import ConfigError
from agent_loop.files.plain_values import parse_json, shown


class McpServer(Section):
    """How a server is reached: give `command` for one that is started here, or `url`."""

    command: str | None = None
    """A program that speaks MCP on its standard input and output."""
    args: list[str] = Field(default=[])
    env: dict[str, str] = Field(default={})
    """Variables of the program, beside the few that are safe to hand on; `$NAME` is one of this process."""
    cwd: str | None = None
    url: str | None = None
    """Of a server that speaks streamable HTTP."""
    headers: dict[str, str] = Field(default={})
    """`$NAME` is an environment variable."""
    auth_token: str | None = None
    """Sent as a bearer token; `$NAME` is an environment variable."""


class McpConfig(McpServer):
    """A server, or a file that names several, and what is used of them."""

    mcp_servers_config_path: str | None = None
    """JSON: `{"mcpServers": {name: {command, args, env, cwd} or {url, headers, auth_token}}}`."""
    tool_selected_list: list[str] | None = None
    """The tools to use, by the server's names; None is all."""
    prefix: str = ""
    """Of the names under which models call the tools."""
    session: Literal["trajectory", "shared"] = "trajectory"
    """A session for each trajectory, so that none sees what another does; or one for all of a process."""
    reconnects: NotNegative | None = None
    """How often a session that broke is opened anew; what the server kept of it is lost. None is 0 for the session of a
    trajectory and 3 for a shared one."""
    start_timeout_s: PositiveSeconds = 60.0
    """Starting the server and asking for its tools, before the first rollout."""
    images: bool = True
    """Pass images on; without, the model is told that there was one."""
    timeout: PositiveSeconds | None = None
    """verl's name of the tools' `timeout_s`."""
    rate_limit: Positive | None = None
    """Calls of each tool that run at once: verl's name of `max_concurrent`."""


def read_servers(config: Mapping[str, Any]) -> tuple[McpConfig, dict[str, McpServer]]:
    """The settings, and the servers by name.

    Raises:
        ConfigError: They are wrong, or the file is.
    """
    where = "the config of mcp"
    settings = parse_section(McpConfig, config, where=where)
    if settings.mcp_servers_config_path is None:
        servers = {where: McpServer(**{key: getattr(settings, key) for key in McpServer.model_fields})}
    else:
        servers = _read_file(Path(settings.mcp_servers_config_path))
    for name, server in servers.items():
        if (server.command is None) == (server.url is None):
            raise ConfigError(f"{name}: give one of command and url")
    return settings, servers


def _read_file(path: Path) -> dict[str, McpServer]:
    try:
        content: Any = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"mcp_servers_config_path: {str(path)!r} cannot be read: {error}") from error
    named: Any = cast(dict[str, Any], content).get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(named, dict) or not named:
        raise ConfigError(
            f'{path}: there are no servers; write {{"mcpServers": {{"name": {{"url": "..."}}}}}}'
        )
    for name, server in cast(dict[str, Any], named).items():
        if not isinstance(server, dict):
            raise ConfigError(
                f"{path}: mcpServers.{name} is {shown(server)}; give keys, such as url or command"
            )
    return {
        name: parse_section(McpServer, server, where=f"{path}: mcpServers.{name}")
        for name, server in cast(dict[str, Any], named).items()
    }

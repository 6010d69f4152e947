"""Configuration of MCP servers and their tools."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import Field

from agent_loop.config import NotNegative, Positive, PositiveSeconds, Section, parse_section
from agent_loop.errors import ConfigError
from agent_loop.files.plain_values import parse_json, shown


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
    """Return the settings, and the servers by name.

    Raises:
        ConfigError: The settings or the file are invalid.
    """
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

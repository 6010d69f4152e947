"""Calls agent programs with a row and the endpoint of a session.

A function gets them as arguments, a command through environment variables and standard input.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, cast

from agent_loop.errors import ConfigError, DataError
from agent_loop.gateway.clients import http_client
from agent_loop.gateway.errors import ProgramFailed
from agent_loop.gateway.listener import Endpoint
from agent_loop.runtime.child_process import CommandResult, inherited_environment, run_command
from agent_loop.runtime.describe import describe_value, one_line
from agent_loop.runtime.user_code import call_function
from agent_loop.types import Row
from agent_loop.workspaces.base import Workspace


class CommandFailed(ProgramFailed):
    """The command exited with an error."""

    def __init__(self, result: CommandResult) -> None:
        code = result.exit_code
        how = f"was ended by signal {-code}" if code < 0 else f"exited with status {code}"
        last = result.stderr.strip().splitlines()[-1:]
        error = ": ".join([f"the program {how}", *(one_line(line, max_length=200) for line in last)])
        super().__init__(error, traceback=result.stderr)


async def call_program(
    function: Callable[..., Any], row: Row, endpoint: Endpoint, workspace: Workspace | None = None
) -> Any:
    """Call a function with the row and those other arguments that it has parameters for. Return its result."""
    async with AsyncExitStack() as stack:
        offered: dict[str, Callable[[], Any]] = {
            "base_url": lambda: endpoint.base_url,
            "api_key": lambda: endpoint.api_key,
            "anthropic_base_url": lambda: endpoint.anthropic_base_url,
            "http_client": lambda: http_client(endpoint.app),
        }
        if workspace is not None:
            offered["workspace"] = lambda: workspace
        arguments = {name: offered[name]() for name in _accepted_names(function, offered)}
        if "http_client" in arguments:
            await stack.enter_async_context(arguments["http_client"])
        return await call_function(function, dict(row), **arguments)


async def call_command(
    command: list[str],
    env: Mapping[str, str],
    row: Row,
    endpoint: Endpoint,
    workspace: Workspace | None = None,
) -> Any:
    """Run a command, in the workspace if there is one, and parse the last line of its standard output.

    Returns:
        The number or dict in the last line; None if the line is not a number or dict in JSON.

    Raises:
        CommandFailed: The exit status is not 0.
        ConfigError: The command cannot be started.
        DataError: The row cannot be written as JSON.
        WorkspaceError: The workspace has ended, or the command cannot be started in it.
    """
    stdin = json.dumps(row, default=_as_json).encode()
    if workspace is None:
        variables = {**inherited_environment(), **_client_variables(endpoint), **env}
        result = await run_command(command, env=variables, stdin=stdin)
    else:
        reached = replace(endpoint, base_url=await workspace.reach(endpoint.base_url))
        result = await workspace.exec(command, env={**_client_variables(reached), **env}, stdin=stdin)
    if result.exit_code:
        raise CommandFailed(result)
    # `splitlines` would also split at characters that may occur in JSON strings.
    last = result.stdout.rstrip().rpartition("\n")[2]
    try:
        value: Any = json.loads(last)
    except ValueError:
        return None
    return cast(Any, value) if isinstance(value, int | float | dict) else None


def checked_command(command: Any) -> list[str]:
    """Return the command as a list of strings.

    Raises:
        ConfigError: The command is not a list of strings.
    """
    words: list[Any] = list(cast(Iterable[Any], command)) if isinstance(command, Iterable) else []
    if isinstance(command, str) or not words or not all(isinstance(word, str) for word in words):
        raise ConfigError(
            f"command is {command!r}; give the program and its arguments as a list of strings: [python, agent.py]"
        )
    return words


def checked_env(env: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables as a dict.

    Raises:
        ConfigError: A value is not a string.
    """
    for name, value in env.items():
        if not isinstance(value, str):
            raise ConfigError(
                f"env.{name} is {describe_value(value)}; environment variables are strings: quote the value"
            )
    return dict(env)


def _accepted_names(function: Callable[..., Any], offered: Mapping[str, Any]) -> list[str]:
    """Return the offered names that the function has parameters for; all names if it has `**kwargs`."""
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return [name for name in offered if takes_any or name in parameters]


def _client_variables(endpoint: Endpoint) -> dict[str, str]:
    """Return the environment variables that OpenAI and Anthropic clients read. They also bypass HTTP proxies."""
    return {
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_BASE": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "ANTHROPIC_BASE_URL": endpoint.anthropic_base_url,
        "ANTHROPIC_API_KEY": endpoint.api_key,
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }


def _as_json(value: Any) -> Any:
    """Convert an array or scalar of numpy or torch to plain Python values.

    Raises:
        DataError: The value is of another type.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    raise DataError(
        f"the row holds {describe_value(value)}, which cannot be written as JSON; a command gets the row as JSON"
    )

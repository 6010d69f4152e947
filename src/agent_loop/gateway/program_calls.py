"""Programs are called with a row and the address of a model: a function by its parameters, a command by its
environment and its standard input."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from typing import Any, cast

from agent_loop.errors import ConfigError, DataError, EpisodeError
from agent_loop.gateway.clients import http_client
from agent_loop.gateway.listener import Endpoint
from agent_loop.gateway.program_process import CommandResult, run_command
from agent_loop.runtime.describe import describe_value, one_line
from agent_loop.runtime.user_code import call_function
from agent_loop.trajectory import Failure
from agent_loop.types import Row


class CommandFailed(EpisodeError):
    """A command ended with an error."""

    def __init__(self, finished: CommandResult) -> None:
        code = finished.exit_code
        how = f"was ended by signal {-code}" if code < 0 else f"exited with status {code}"
        last = finished.stderr.strip().splitlines()[-1:]
        error = ": ".join([f"the program {how}", *(one_line(line, max_length=200) for line in last)])
        super().__init__(error)
        self.failure = Failure(error=error, traceback=finished.stderr)


async def call_program(function: Callable[..., Any], row: Row, endpoint: Endpoint) -> Any:
    """What a function returns that is given the row and what it takes of the address."""
    async with AsyncExitStack() as stack:
        offered: dict[str, Callable[[], Any]] = {
            "base_url": lambda: endpoint.base_url,
            "api_key": lambda: endpoint.api_key,
            "anthropic_base_url": lambda: endpoint.anthropic_base_url,
            "http_client": lambda: http_client(endpoint.app),
        }
        arguments = {name: offered[name]() for name in _taken(function, offered)}
        if "http_client" in arguments:
            await stack.enter_async_context(arguments["http_client"])
        return await call_function(function, dict(row), **arguments)


async def call_command(command: list[str], env: Mapping[str, str], row: Row, endpoint: Endpoint) -> Any:
    """The number or the dict that is the last line of what a command prints; None if that is something else.

    Raises:
        CommandFailed: Its exit status is not 0.
        ConfigError: It cannot be started.
        DataError: The row has no form in JSON.
    """
    finished = await run_command(
        command, env={**_address(endpoint), **env}, stdin=json.dumps(row, default=_as_json).encode()
    )
    if finished.exit_code:
        raise CommandFailed(finished)
    # Not `splitlines`, which also parts lines at characters that JSON texts may hold.
    last = finished.stdout.rstrip().rpartition("\n")[2]
    try:
        said: Any = json.loads(last)
    except ValueError:
        return None
    return cast(Any, said) if isinstance(said, int | float | dict) else None


def checked_command(command: Any) -> list[str]:
    """Raises: ConfigError: It is no list of words."""
    words: list[Any] = list(cast(Iterable[Any], command)) if isinstance(command, Iterable) else []
    if isinstance(command, str) or not words or not all(isinstance(word, str) for word in words):
        raise ConfigError(
            f"command is {command!r}; give the program and its arguments as a list of texts: [python, agent.py]"
        )
    return words


def checked_env(env: Mapping[str, Any]) -> dict[str, str]:
    """Raises: ConfigError: A value is no text."""
    for name, value in env.items():
        if not isinstance(value, str):
            raise ConfigError(
                f"env.{name} is {describe_value(value)}; environment variables are texts: quote it"
            )
    return dict(env)


def _taken(function: Callable[..., Any], offered: Mapping[str, Any]) -> list[str]:
    """The names that a function takes, and those alone; all of them if it has `**kwargs`."""
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return [name for name in offered if takes_any or name in parameters]


def _address(endpoint: Endpoint) -> dict[str, str]:
    """The variables in which clients look for a server; no proxy stands between."""
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
    """Arrays and scalars of numpy and torch as JSON.

    Raises:
        DataError: The value is something else.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    raise DataError(
        f"the row holds {describe_value(value)}, which is no JSON; a command is given the row as JSON"
    )

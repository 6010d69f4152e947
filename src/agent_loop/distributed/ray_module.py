"""Import of Ray, which is an optional dependency, and helpers around Ray."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Awaitable, Generator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from agent_loop.errors import ConfigError
from agent_loop.runtime.describe import describe_error


class ActorLost(Exception):
    """An actor's process is gone or cannot be reached. The call may or may not have run."""


def load_ray() -> Any:
    """Import Ray."""
    try:
        return import_module("ray")
    except ImportError as error:
        raise ConfigError('trainer.runtime is ray, which needs: pip install "agent-loop[ray]"') from error


@contextmanager
def on_loopback() -> Generator[None]:
    """Make a cluster that `ray.init` starts within the block listen on loopback alone.

    Ray has a switch for it, meant for machines whose firewall asks about every port. Ray reads the switch when it is
    imported, so that its constant is set as well.
    """
    constants: Any = import_module("ray._private.ray_constants")
    variable, name = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "ENABLE_RAY_CLUSTER"
    environment, constant = os.environ.get(variable), getattr(constants, name, True)
    os.environ[variable] = "0"
    setattr(constants, name, False)
    try:
        yield
    finally:
        setattr(constants, name, constant)
        if environment is None:
            del os.environ[variable]
        else:
            os.environ[variable] = environment


def enter_folder(folder: str) -> None:
    """Change to the driver's working directory, which relative paths of the configuration refer to."""
    with suppress(OSError):  # on another machine, which gets the files by trainer.ray.runtime_env
        os.chdir(folder)


async def await_result(call: Awaitable[Any]) -> Any:
    """Await a call of an actor and return its result."""
    with _as_raised():
        return await call


async def iterate_results(stream: Any) -> AsyncGenerator[Any]:
    """Yield what an async generator of an actor yields. `stream` is what the call returned."""
    with _as_raised():
        async for result in stream:
            yield await result


async def cancel_stream(stream: Any) -> None:
    """Cancel an async generator of an actor, and wait until Ray no longer runs it. A lost actor runs nothing.

    Ray may leave the generator where it last yielded, without running what is left of it.
    """
    load_ray().cancel(stream, recursive=False)  # what it called may have to end in an orderly way
    errors: Any = import_module("ray.exceptions")
    with suppress(errors.RayError, ActorLost):
        await stream.completed()


@contextmanager
def _as_raised() -> Generator[None]:
    """Raise errors of an actor as its code raised them, and `ActorLost` if the actor is gone."""
    errors: Any = import_module("ray.exceptions")
    try:
        yield
    except errors.RayTaskError as error:
        raise error.cause from None
    except (errors.RayActorError, errors.RaySystemError, errors.ObjectLostError) as error:
        raise ActorLost(describe_error(error)) from None

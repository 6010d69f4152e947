"""Calls of the methods of environments and games: written with `def` or `async def`, and bounded in time."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from agent_loop.errors import DataError, EnvironmentBug, EnvironmentUnavailable
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.isolated_task import ABANDON_GRACE_S, DeadlineExpired
from agent_loop.runtime.threads import OneThread
from agent_loop.runtime.user_code import run_bounded

ResultT = TypeVar("ResultT")


async def call_method(method: Callable[..., Any], thread: OneThread, *args: Any, **kwargs: Any) -> Any:
    """Await an async method on the event loop; run any other method in the thread."""
    if inspect.iscoroutinefunction(method):
        return await method(*args, **kwargs)
    result = await thread.run(method, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


async def run_method(
    function: Callable[[], Awaitable[ResultT]], *, what: str, timeout_s: float, key: str
) -> ResultT:
    """Await a method of an environment or a game."""
    try:
        return await run_bounded(function, timeout_s=timeout_s, name=what)
    except (EnvironmentBug, EnvironmentUnavailable, DataError):
        raise
    except DeadlineExpired as error:
        raise EnvironmentBug(f"{what} {error}; fix it, or raise rollout.multi_turn.{key}") from error
    except Exception as error:
        raise EnvironmentBug(f"{what} raised {describe_error(error)}; fix it") from error


async def run_close(close: Callable[[], Awaitable[object]], *, what: str, timeout_s: float) -> list[str]:
    """Await a `close`, shielded from cancellation, and return what went wrong."""
    bounded = partial(run_bounded, close, timeout_s=timeout_s, name=f"closing {what}")
    try:
        await run_shielded(bounded, timeout_s=timeout_s + 2 * ABANDON_GRACE_S)
    except Exception as error:  # noqa: BLE001  (close boundary: named in the record)
        return [f"closing {what}: {describe_error(error)}"]
    return []

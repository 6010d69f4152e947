"""Calls to user code: bounded in time, with errors that are told apart from a cancellation."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar, cast

from agent_loop.runtime.isolated_task import ABANDON_GRACE_S, Abandoned, DeadlineExpired, IsolatedTask
from agent_loop.runtime.threads import run_in_thread

ResultT = TypeVar("ResultT")


async def run_bounded(
    function: Callable[[], Awaitable[ResultT]],
    *,
    timeout_s: float | None,
    name: str = "",
    grace_s: float = ABANDON_GRACE_S,
) -> ResultT:
    """Await user code in a task of its own, for at most `timeout_s + grace_s`.

    The task is cancelled at the time limit, and when the caller is cancelled. A task that still runs `grace_s` later is
    abandoned: it is logged, counted, recorded on its trajectory (`IncidentKind.ABANDONED`), and no longer awaited. The
    call therefore returns within `timeout_s + grace_s`, or within `grace_s` of the caller's cancellation, unless the
    code blocks the event loop.

    An exception of the code is raised here as an `Exception`. CancelledError is raised only if the caller was
    cancelled, even if the code has returned a result in the meantime.

    Args:
        function: User code. It sees the caller's context variables, and the caller sees those that it sets.
        timeout_s: None sets no limit; the caller's cancellation still ends the call.
        name: Name of the code in the log, such as "tool 'search'".
        grace_s: Seconds to end after the cancellation. Code that awaits other user code needs a longer grace than that
            code.

    Raises:
        Abandoned: The time limit passed, and the code did not end within its grace. A `DeadlineExpired`.
        DeadlineExpired: The time limit passed. A TimeoutError of the function is raised unchanged.
        RuntimeError: The function raised CancelledError although nobody cancelled it, tried to end the process, or
            raised an object that is not an `Exception`.
    """
    task = IsolatedTask(function, name=name or _name_of(function))
    try:
        async with asyncio.timeout(timeout_s):
            await task.wait()
    except TimeoutError as error:
        limit = f"took longer than {timeout_s or 0:g} s"
        if not await task.stop(grace_s=grace_s):
            raise Abandoned(
                f"{limit}, still ran {grace_s:g} s after it was cancelled, and was abandoned"
            ) from error
        if task.was_cancelled:
            raise DeadlineExpired(limit) from error
    except asyncio.CancelledError:
        await task.stop(grace_s=grace_s)
        raise
    return task.result()


async def call_function(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Await an async function on the event loop; run any other function in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result = await run_in_thread(function, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


def _name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, partial):
        function = cast("partial[Any]", function).func
    return str(getattr(function, "__qualname__", type(function).__qualname__))

"""Calls of methods that a user wrote with `def` or `async def`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from agent_loop.runtime.threads import OneThread


async def call_method(method: Callable[..., Any], thread: OneThread, *args: Any, **kwargs: Any) -> Any:
    """Await an async method on the event loop; run any other method in the thread."""
    if inspect.iscoroutinefunction(method):
        return await method(*args, **kwargs)
    result = await thread.run(method, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result

"""Tasks that callbacks start, and an owner that waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class BackgroundTasks:
    """Tasks that are started by code that cannot await them, such as a callback of the event loop.

    The tasks are kept until they end. The owner awaits `close` at its own end.
    """

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def __len__(self) -> int:
        """Return the number of tasks that have not ended."""
        return len(self._tasks)

    def start(self, call: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        """Run a call in a task. asyncio logs an exception of the call that nobody retrieves."""
        task = asyncio.create_task(call)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    async def wait(self) -> None:
        """Wait until the tasks that run have ended. Their exceptions are not raised."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Cancel the tasks that run, in the order of their start, and wait until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

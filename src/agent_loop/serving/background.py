"""Tasks of an application that outlive the requests that started them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from agent_loop.errors import RequestError


class BackgroundTasks:
    """Starts tasks while the application runs, and cancels them when it ends."""

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Allow tasks until exit."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                yield
            finally:
                self._group = None
                for task in self._tasks:
                    task.cancel()

    def start(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task.

        Raises:
            RequestError: The application is not running, for example because it stops.
        """
        if self._group is None:
            call.close()
            raise RequestError(
                "background is not available, because the server is stopping", param="background"
            )
        task = self._group.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

"""Calls of coroutines from code that is not async, even while an event loop is running, as in notebooks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from threading import Thread
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


def run_sync(make: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
    """Run a coroutine to its end and return its result.

    If an event loop is running in this thread, the coroutine runs on a loop of its own in another thread. Ctrl-C
    cancels the coroutine and waits for it, then raises KeyboardInterrupt.

    Args:
        make: Function that returns the coroutine.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(make())
    return _InThread(make).result()


class _InThread:
    def __init__(self, make: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._make = make
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._error: BaseException | None = None
        self._value: Any = None
        self._thread = Thread(target=self._run, name="agent-loop-sync", daemon=True)

    def result(self) -> Any:
        self._thread.start()
        try:
            self._thread.join()
        except KeyboardInterrupt:
            if self._loop is not None and self._task is not None:
                self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join()
            raise
        if self._error is not None:
            raise self._error
        return self._value

    def _run(self) -> None:
        try:
            self._value = asyncio.run(self._main())
        except BaseException as error:  # noqa: BLE001  (raised in the thread of the caller)
            self._error = error

    async def _main(self) -> Any:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        return await self._make()

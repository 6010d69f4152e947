"""An event loop in a thread of its own: TRL's trainers block, the rollout layer does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")
END_TIMEOUT_S = 60.0
"""What is interrupted gets so long to clean up."""
LOOK_EVERY_S = 0.5
"""A signal that comes just before a thread waits for a lock is not seen before the wait is over."""


class LoopThread:
    """Runs coroutines for callers in other threads. Single use; `close` ends it."""

    def __init__(self, name: str) -> None:
        self._loop_made: Future[asyncio.AbstractEventLoop] = Future()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run_until_closed()), name=name, daemon=True
        )
        self._thread.start()
        self._loop = self._loop_made.result()

    def run(self, call: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Waits for a coroutine's result. Ctrl-C cancels it, and is raised when it has ended."""
        future: Future[ResultT] = Future()
        tasks: list[asyncio.Task[ResultT]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(call))
            tasks[0].add_done_callback(partial(_hand_over, to=future))

        def end() -> None:
            for task in tasks:
                task.cancel()
            if not tasks:
                call.close()
                future.set_exception(CancelledError())

        try:
            self._loop.call_soon_threadsafe(begin)
            while not future.done():
                wait([future], timeout=LOOK_EVERY_S)
        except BaseException:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(end)  # it comes after `begin`
                wait([future], timeout=END_TIMEOUT_S)
            raise
        return future.result()

    def start(self, call: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        """Begins a coroutine and returns its result to come."""
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def call_soon(self, function: Callable[[], object]) -> None:
        """Has the loop call a function; nothing if the loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Cancels what still runs, and waits for the thread to end."""
        self.call_soon(self._closing.set)
        self._thread.join()

    async def _run_until_closed(self) -> None:
        self._loop_made.set_result(asyncio.get_running_loop())
        await self._closing.wait()


def _hand_over(task: asyncio.Task[ResultT], *, to: Future[ResultT]) -> None:
    if task.cancelled():
        to.set_exception(CancelledError())
    elif (error := task.exception()) is not None:
        to.set_exception(error)
    else:
        to.set_result(task.result())

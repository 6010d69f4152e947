"""Event loop in a background thread, for the rollout layer beside TRL's blocking trainers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")
CANCEL_TIMEOUT_S = 60.0
"""Seconds that an interrupted coroutine has to clean up."""
POLL_INTERVAL_S = 0.5
"""Longest wait in one go. A signal that arrives just before a wait is handled only after the wait."""


class LoopThread:
    """Event loop that runs coroutines for other threads until it is closed. Single use."""

    def __init__(self, name: str) -> None:
        self._loop_made: Future[asyncio.AbstractEventLoop] = Future()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run_until_closed()), name=name, daemon=True
        )
        self._thread.start()
        self._loop = self._loop_made.result()

    def run(self, call: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run a coroutine and return its result. Ctrl-C cancels the coroutine and is raised once it has ended."""
        future: Future[ResultT] = Future()
        tasks: list[asyncio.Task[ResultT]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(call))
            tasks[0].add_done_callback(partial(_copy_result, to=future))

        def end() -> None:
            for task in tasks:
                task.cancel()
            if not tasks:
                call.close()
                future.set_exception(CancelledError())

        try:
            self._loop.call_soon_threadsafe(begin)
            while not future.done():
                wait([future], timeout=POLL_INTERVAL_S)
        except BaseException:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(end)  # runs after `begin`
                wait([future], timeout=CANCEL_TIMEOUT_S)
            raise
        return future.result()

    def start(self, call: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        """Start a coroutine and return a future of its result."""
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def call_soon(self, function: Callable[[], object]) -> None:
        """Schedule a call of a function in the event loop. Do nothing if the loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Cancel running coroutines, and wait for the thread to end."""
        self.call_soon(self._closing.set)
        self._thread.join()

    async def _run_until_closed(self) -> None:
        self._loop_made.set_result(asyncio.get_running_loop())
        await self._closing.wait()


def _copy_result(task: asyncio.Task[ResultT], *, to: Future[ResultT]) -> None:
    if task.cancelled():
        to.set_exception(CancelledError())
    elif (error := task.exception()) is not None:
        to.set_exception(error)
    else:
        to.set_result(task.result())

"""An event loop in a thread of its own: TRL's trainers block, the rollout layer does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")
END_TIMEOUT_S = 60.0
"""What is interrupted gets so long to clean up."""


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
        ended = threading.Event()

        async def run_to_end() -> ResultT:
            try:
                return await call
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(run_to_end(), self._loop)
        try:
            return future.result()
        except BaseException:
            if future.cancel():
                ended.wait(END_TIMEOUT_S)
            raise

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

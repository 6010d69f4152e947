"""Ctrl-C as a request to stop after the current step."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

from agent_loop.runtime.concurrency import run_while

ResultT = TypeVar("ResultT")


class Interrupt:
    """Stop request of the first SIGINT. The second SIGINT raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self._requested = asyncio.Event()

    @property
    def is_requested(self) -> bool:
        return self._requested.is_set()

    @contextmanager
    def listening(self) -> Generator[None]:
        """Handle SIGINT while the body runs. Do nothing outside the main thread, because only that gets signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        previous = signal.getsignal(signal.SIGINT)

        def on_sigint() -> None:
            loop.remove_signal_handler(signal.SIGINT)  # the second one gets Python's own handler
            self._requested.set()

        loop.add_signal_handler(signal.SIGINT, on_sigint)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, previous)

    async def unless_requested(self, call: Coroutine[Any, Any, ResultT]) -> ResultT | None:
        """Await a call. When a stop is requested, cancel the call and return None."""

        async def requested() -> None:
            await self._requested.wait()

        return await run_while(call, condition=requested())

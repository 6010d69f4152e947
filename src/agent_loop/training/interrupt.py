"""Ctrl-C as a request to stop after the current step."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager


class Interrupt:
    """Stop request of the first SIGINT. The second SIGINT raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self._is_requested = False
        self._scope: asyncio.Timeout | None = None

    @property
    def is_requested(self) -> bool:
        return self._is_requested

    def request(self) -> None:
        """Request a stop. Call it in the event loop only."""
        self._is_requested = True
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())

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
            self.request()

        loop.add_signal_handler(signal.SIGINT, on_sigint)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, previous)

    @asynccontextmanager
    async def abandoning(self) -> AsyncGenerator[None]:
        """Cancel the body when a stop is requested, without raising. Only one body may run at a time."""
        scope = self._scope = asyncio.timeout(None)
        try:
            async with scope:
                if self._is_requested:
                    scope.reschedule(asyncio.get_running_loop().time())
                yield
        except TimeoutError:
            if not scope.expired():
                raise
        finally:
            self._scope = None

"""Ctrl-C, as a request to stop in good order."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager


class Interrupt:
    """The first SIGINT asks to stop; the second one raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self._is_requested = False
        self._scope: asyncio.Timeout | None = None

    @property
    def is_requested(self) -> bool:
        return self._is_requested

    def request(self) -> None:
        """Asks to stop. From the event loop only."""
        self._is_requested = True
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())

    @contextmanager
    def listening(self) -> Generator[None]:
        """Takes SIGINT for itself meanwhile. Off the main thread, which alone gets signals, it does nothing."""
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
        """Cancels its body when a stop is requested, and ends quietly then. One at a time."""
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

"""A completion on its way to those who asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from agent_loop.completions.response_builder import ParsedChunk, ResponseBuilder
from agent_loop.errors import AgentLoopError


class SharedCompletion:
    """What the model says to one request. A request that is sent again while it is under way listens too.

    When the last listener goes before the end, the completion is aborted.
    """

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        """Brings the completion about."""
        self.writer: ResponseBuilder | None = None
        """Set when the model begins to speak."""
        self.error: AgentLoopError | None = None
        self.is_over = False
        self._steps: list[ParsedChunk] = []
        self._num_listeners = 0
        self._news = asyncio.Event()

    @property
    def is_good(self) -> bool:
        """It is under way, or ended in good order: who asks the same once more may have it."""
        return self.error is None and not (self.task is not None and self.task.cancelling())

    def add(self, step: ParsedChunk) -> None:
        """Takes what a step of sampling adds."""
        self._steps.append(step)
        self._tell()

    def end(self, error: AgentLoopError | None = None) -> None:
        """Nothing more comes."""
        if not self.is_over:
            self.error, self.is_over = error, True
            self._tell()

    async def follow(self) -> AsyncGenerator[ParsedChunk]:
        """Every step, from the first.

        Raises:
            AgentLoopError: The completion failed.
        """
        self._num_listeners += 1
        try:
            place = 0
            while True:
                while place < len(self._steps):
                    yield self._steps[place]
                    place += 1
                if self.is_over:
                    break
                await self._news.wait()
            if self.error is not None:
                raise self.error
        finally:
            self._num_listeners -= 1
            if not self._num_listeners and not self.is_over and self.task is not None:
                self.task.cancel()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

"""A running completion that one or more requests follow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from agent_loop.completions.response_builder import ParsedChunk, ResponseBuilder
from agent_loop.errors import AgentLoopError


class SharedChoices:
    """The completions of one request, as many as its `n`."""

    def __init__(self, choices: Sequence[SharedCompletion]) -> None:
        self.choices = choices

    @property
    def is_reusable(self) -> bool:
        """Whether a retry may follow these completions: none of them failed."""
        return all(choice.is_reusable for choice in self.choices)


class SharedCompletion:
    """Completion that one or more requests follow.

    A retry that arrives while the completion is running follows the same completion. The completion is aborted when
    its last follower leaves before the end.
    """

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        """Task that samples the completion."""
        self.builder: ResponseBuilder | None = None
        """Set just before sampling starts."""
        self.error: AgentLoopError | None = None
        self.is_finished = False
        self._chunks: list[ParsedChunk] = []
        self._num_followers = 0
        self._updated = asyncio.Event()

    @property
    def is_reusable(self) -> bool:
        """Whether a retry may follow this completion: it is running, or it finished without an error."""
        return self.error is None and not (self.task is not None and self.task.cancelling())

    def add(self, chunk: ParsedChunk) -> None:
        """Append a chunk and wake all followers."""
        self._chunks.append(chunk)
        self._wake_followers()

    def finish(self, error: AgentLoopError | None = None) -> None:
        """Mark the completion as finished. Do nothing if it is finished already."""
        if not self.is_finished:
            self.error, self.is_finished = error, True
            self._wake_followers()

    async def follow(self) -> AsyncGenerator[ParsedChunk]:
        """Yield all chunks, oldest first, and wait for new ones until the completion is finished.

        Raises:
            AgentLoopError: The completion failed.
        """
        self._num_followers += 1
        try:
            position = 0
            while True:
                while position < len(self._chunks):
                    yield self._chunks[position]
                    position += 1
                if self.is_finished:
                    break
                await self._updated.wait()
            if self.error is not None:
                raise self.error
        finally:
            self._num_followers -= 1
            if not self._num_followers and not self.is_finished and self.task is not None:
                self.task.cancel()

    def _wake_followers(self) -> None:
        self._updated.set()
        self._updated = asyncio.Event()

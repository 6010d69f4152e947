"""A running completion that one or more requests follow."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agent_loop.errors import AgentLoopError
from agent_loop.serve.chat_requests import ChatCompletionRequest
from agent_loop.serve.completions import ReplyChunk
from agent_loop.serve.conversation_tree import MessageKey, digest


class SharedCompletion:
    """Completion that one or more requests follow.

    A retry that arrives while the completion is running follows the same completion. The completion is aborted when
    its last follower leaves before the end.
    """

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        """Task that samples the completion."""
        self.chunks: list[ReplyChunk] = []
        self.error: AgentLoopError | None = None
        self.is_finished = False
        self._num_followers = 0
        self._updated = asyncio.Event()

    @property
    def is_reusable(self) -> bool:
        """Whether a retry may follow this completion: it is running, or it finished without an error."""
        return self.error is None and not (self.task is not None and self.task.cancelling())

    def add(self, chunk: ReplyChunk) -> None:
        """Append a chunk and wake all followers."""
        self.chunks.append(chunk)
        self._wake_followers()

    def finish(self, error: AgentLoopError | None = None) -> None:
        """Mark the completion as finished. Do nothing if it is finished already."""
        if not self.is_finished:
            self.error, self.is_finished = error, True
            self._wake_followers()

    async def follow(self) -> AsyncGenerator[ReplyChunk]:
        """Yield all chunks, oldest first, and wait for new ones until the completion is finished."""
        self._num_followers += 1
        try:
            position = 0
            while True:
                while position < len(self.chunks):
                    yield self.chunks[position]
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


MAX_KEPT = 64
"""Number of completions that a session keeps for retries. As many as a session has branches by default."""


@dataclass(frozen=True, slots=True)
class RetryInfo:
    """Headers that tell whether a request is a retry."""

    num_retries: int = 0
    """Number of earlier attempts by the client."""
    idempotency_key: str | None = None
    """Requests with the same body and the same key are one request."""


class _Kept(NamedTuple):
    fingerprint: str
    idempotency_key: str | None
    completions: Sequence[SharedCompletion]


class CompletionIndex:
    """The latest completions of a session, by request: as many for each as its `n`."""

    def __init__(self) -> None:
        self._kept: deque[_Kept] = deque(maxlen=MAX_KEPT)

    def find(self, fingerprint: str, retry: RetryInfo) -> Sequence[SharedCompletion] | None:
        """Return the completions that a retry gets; None if the request needs new ones.

        If several requests were equal and one of them failed, the retry is taken to be one of the failed request.
        """
        key = (fingerprint, retry.idempotency_key)
        same = [kept for kept in self._kept if (kept.fingerprint, kept.idempotency_key) == key]
        if not same or (not retry.num_retries and retry.idempotency_key is None):
            return None
        failed = next((kept for kept in same if not all(c.is_reusable for c in kept.completions)), None)
        if failed is None:
            return same[-1].completions
        self._kept.remove(failed)
        return None

    def add(self, fingerprint: str, retry: RetryInfo, completions: Sequence[SharedCompletion]) -> None:
        """Store the new completions of a request."""
        self._kept.append(_Kept(fingerprint, retry.idempotency_key, completions))


def fingerprint_of(request: ChatCompletionRequest, keys: Sequence[MessageKey]) -> str:
    """Return a digest that is equal for equal requests, streamed or not."""
    rest = request.model_dump(exclude={"messages", "stream", "stream_options"}, exclude_none=True)
    return digest([key.exact_key for key in keys], rest)

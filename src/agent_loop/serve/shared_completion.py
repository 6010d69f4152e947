"""A running completion that one or more requests follow."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from uuid import uuid4

from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import AgentLoopError, ServerError
from agent_loop.serve.chat_replies import (
    ChatCompletion,
    ChatCompletionChunk,
    ParsedChunk,
    ResponseBuilder,
    streamed_reply,
    whole_reply,
)
from agent_loop.serve.chat_requests import ChatCompletionRequest
from agent_loop.serve.conversation_tree import MessageKey, digest
from agent_loop.types import IntArray


class SharedChoices:
    """The completions of one request, as many as its `n`."""

    def __init__(self, choices: Sequence[SharedCompletion], *, template: ChatTemplate) -> None:
        self._choices = choices
        self._template = template
        self._id = f"chatcmpl-{uuid4().hex}"
        self._created = int(time.time())

    @property
    def is_reusable(self) -> bool:
        """Whether a retry may follow these completions: none of them failed."""
        return all(choice.is_reusable for choice in self._choices)

    async def whole(self, request: ChatCompletionRequest) -> ChatCompletion:
        """Wait for the whole completions and return them, for one of the requests that follow them."""
        choices = [choice.follow() for choice in self._choices]
        return await whole_reply(choices, make_builder=partial(self._builder, request))

    def stream(self, request: ChatCompletionRequest) -> AsyncGenerator[ChatCompletionChunk]:
        """Yield the completions in chunks while they are sampled, for one of the requests that follow them."""
        choices = [choice.follow() for choice in self._choices]
        return streamed_reply(choices, make_builder=partial(self._builder, request))

    def _builder(self, request: ChatCompletionRequest) -> ResponseBuilder:
        for choice in self._choices:
            if choice.prompt_ids is not None:
                return ResponseBuilder(request, self._template, choice.prompt_ids, self._id, self._created)
        raise ServerError("the completion ended before sampling started; send the request again")


class SharedCompletion:
    """Completion that one or more requests follow.

    A retry that arrives while the completion is running follows the same completion. The completion is aborted when
    its last follower leaves before the end.
    """

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        """Task that samples the completion."""
        self.prompt_ids: IntArray | None = None
        """Tokens before the first sampled one. Set just before sampling starts."""
        self.chunks: list[ParsedChunk] = []
        self.error: AgentLoopError | None = None
        self.is_finished = False
        self._num_followers = 0
        self._updated = asyncio.Event()

    @property
    def is_reusable(self) -> bool:
        """Whether a retry may follow this completion: it is running, or it finished without an error."""
        return self.error is None and not (self.task is not None and self.task.cancelling())

    def add(self, chunk: ParsedChunk) -> None:
        """Append a chunk and wake all followers."""
        self.chunks.append(chunk)
        self._wake_followers()

    def finish(self, error: AgentLoopError | None = None) -> None:
        """Mark the completion as finished. Do nothing if it is finished already."""
        if not self.is_finished:
            self.error, self.is_finished = error, True
            self._wake_followers()

    async def follow(self) -> AsyncGenerator[ParsedChunk]:
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
    completion: SharedChoices


class CompletionIndex:
    """The latest completions of a session, by request."""

    def __init__(self) -> None:
        self._kept: deque[_Kept] = deque(maxlen=MAX_KEPT)

    def find(self, fingerprint: str, retry: RetryInfo) -> SharedChoices | None:
        """Return the completion that a retry gets; None if the request needs a new completion.

        If several requests have the same fingerprint and the completion of one failed, the retry is taken to be a
        retry of the failed one, and needs a new completion.
        """
        same = [kept for kept in self._kept if kept.fingerprint == fingerprint]
        if retry.idempotency_key is not None:
            same = [kept for kept in same if kept.idempotency_key == retry.idempotency_key]
            return same[-1].completion if same and same[-1].completion.is_reusable else None
        if not retry.num_retries or not same:
            return None
        failed = next((kept for kept in same if not kept.completion.is_reusable), None)
        if failed is None:
            return same[-1].completion
        self._kept.remove(failed)
        return None

    def add(self, fingerprint: str, retry: RetryInfo, completion: SharedChoices) -> None:
        """Store the new completion of a request."""
        self._kept.append(_Kept(fingerprint, retry.idempotency_key, completion))


def fingerprint_of(request: ChatCompletionRequest, keys: Sequence[MessageKey]) -> str:
    """Return a digest that is equal for equal requests, streamed or not."""
    rest = request.model_dump(exclude={"messages", "stream", "stream_options"}, exclude_none=True)
    return digest([key.exact_key for key in keys], rest)

"""Recognises retries: requests that a client sends again because it did not receive the response."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agent_loop.completions.requests import ChatCompletionRequest
from agent_loop.gateway.message_keys import MessageKey, digest
from agent_loop.gateway.shared_completion import SharedChoices

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

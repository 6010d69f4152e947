"""Recognises retries: requests that a client sends again because it did not receive the response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_loop.completions.requests import ChatCompletionRequest
from agent_loop.gateway.message_keys import MessageKey, digest
from agent_loop.gateway.shared_completion import SharedChoices


@dataclass(frozen=True, slots=True)
class RetryInfo:
    """Headers that tell whether a request is a retry."""

    num_retries: int = 0
    """Number of earlier attempts by the client."""
    idempotency_key: str | None = None
    """Requests with the same body and the same key are one request."""


class CompletionIndex:
    """Completions of a session, by request."""

    def __init__(self) -> None:
        self._by_request: dict[str, list[SharedChoices]] = {}
        self._by_key: dict[str, SharedChoices] = {}

    def find(self, fingerprint: str, retry: RetryInfo) -> SharedChoices | None:
        """Return the completion that a retry gets; None if the request needs a new completion.

        If several requests have the same fingerprint and the completion of one failed, the retry is taken to be a
        retry of the failed one, and needs a new completion.
        """
        if retry.idempotency_key is not None:
            completion = self._by_key.get(digest(fingerprint, retry.idempotency_key))
            return completion if completion is not None and completion.is_reusable else None
        completions = self._by_request.get(fingerprint)
        if not retry.num_retries or not completions:
            return None
        failed = next((completion for completion in completions if not completion.is_reusable), None)
        if failed is None:
            return completions[-1]
        completions.remove(failed)
        return None

    def add(self, fingerprint: str, retry: RetryInfo, completion: SharedChoices) -> None:
        """Store the new completion of a request."""
        self._by_request.setdefault(fingerprint, []).append(completion)
        if retry.idempotency_key is not None:
            self._by_key[digest(fingerprint, retry.idempotency_key)] = completion


def fingerprint_of(request: ChatCompletionRequest, keys: Sequence[MessageKey]) -> str:
    """Return a digest that is equal for equal requests, streamed or not."""
    rest = request.model_dump(exclude={"messages", "stream", "stream_options"}, exclude_none=True)
    return digest([key.exact_key for key in keys], rest)

"""Which requests are sent a second time because their answer got lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_loop.completions.requests import ChatCompletionRequest
from agent_loop.gateway.message_keys import MessageKey, digest
from agent_loop.gateway.shared_completion import SharedCompletion


@dataclass(frozen=True, slots=True)
class RetryInfo:
    """What a request says of itself beside its body."""

    num_retries: int = 0
    """How often the client sent it before without an answer."""
    idempotency_key: str | None = None
    """The same request with the same key is one."""


class CompletionIndex:
    """The answers of a session, by what was asked."""

    def __init__(self) -> None:
        self._by_request: dict[str, list[SharedCompletion]] = {}
        self._by_key: dict[str, SharedCompletion] = {}

    def find(self, fingerprint: str, attempt: RetryInfo) -> SharedCompletion | None:
        """The answer that a retry gets; None if the request is none, or its answer failed.

        Of several that asked the same, one whose answer failed is taken to be the one that is sent again.
        """
        if attempt.idempotency_key is not None:
            answer = self._by_key.get(digest(fingerprint, attempt.idempotency_key))
            return answer if answer is not None and answer.is_good else None
        answers = self._by_request.get(fingerprint)
        if not attempt.num_retries or not answers:
            return None
        failed = next((answer for answer in answers if not answer.is_good), None)
        if failed is None:
            return answers[-1]
        answers.remove(failed)
        return None

    def add(self, fingerprint: str, attempt: RetryInfo, answer: SharedCompletion) -> None:
        """Takes the answer to a request that is none."""
        self._by_request.setdefault(fingerprint, []).append(answer)
        if attempt.idempotency_key is not None:
            self._by_key[digest(fingerprint, attempt.idempotency_key)] = answer


def fingerprint_of(request: ChatCompletionRequest, forms: Sequence[MessageKey]) -> str:
    """What tells one request from another, whichever way its answer is sent."""
    rest = request.model_dump(exclude={"messages", "stream", "stream_options"}, exclude_none=True)
    return digest([link.exact_key for link in forms], rest)

"""Base class of the backends that compute the requests of an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

from agent_loop.servers.embedded.request import EngineRequest, ScoreRequest

CacheKind: TypeAlias = Literal["shared", "per_request", "none"]
"""`shared`: one KV cache, all requests in one forward. `per_request`: the model's own cache and attention, one request
per forward. `none`: no cache; the whole sequence is computed again for each token."""


class StepOutput(NamedTuple):
    """Result of one step."""

    requests: tuple[EngineRequest, ...]
    """Requests whose next token can be sampled. The other requests are still in prefill."""
    logits: Tensor
    """One row for each of `requests`, [rows, vocab]."""
    num_forwards: int
    num_prompt_tokens: int
    """Number of prompt tokens that the step computed."""


class ComputationBackend(ABC):
    """Computes the next-token logits of an engine's requests, and owns their caches."""

    kind: CacheKind
    resumes_turns: bool
    """Whether the next turn of a session computes only the tokens that it adds."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory of the caches in bytes; 0 while they are freed."""

    @property
    @abstractmethod
    def has_room(self) -> bool:
        """Whether another request can be admitted."""

    @abstractmethod
    def allocate(self) -> None:
        """Allocate the caches if they are freed."""

    @abstractmethod
    def free(self) -> None:
        """Free the caches. All requests must have been released before."""

    @abstractmethod
    def admit(self, request: EngineRequest) -> bool:
        """Start a request and set its `num_cached_tokens`. Return False if it has to wait for another request.

        Raises:
            FeaturesError: An image of the request does not fit the model. The request is admitted nevertheless and has
                to be released.
        """

    @abstractmethod
    def step(self) -> StepOutput:
        """Compute the next tokens of the admitted requests. At least one request must be admitted."""

    @abstractmethod
    def prefill(self, texts: Sequence[ScoreRequest], *, chunk_tokens: int) -> list[Tensor]:
        """Compute the next `chunk_tokens` tokens of one text, or several texts that have no more tokens together.

        Returns:
            Logits of each text after its new tokens from `ScoreRequest.first` on, [rows, vocab].
        """

    @abstractmethod
    def append(self, request: EngineRequest, token_id: int) -> None:
        """Append a sampled token, which the next step computes."""

    @abstractmethod
    def release(self, request: EngineRequest, *, discard: bool = False) -> None:
        """Release an admitted request. Its cache is kept for the session's next turn, unless `discard` is set."""

    @abstractmethod
    def mark_stale(self, request: EngineRequest) -> None:
        """Keep the cache of an admitted request, but do not reuse it for other requests: older weights computed it."""

    @abstractmethod
    def end_session(self, session: str) -> None:
        """End a session, which will have no further turn."""

    @abstractmethod
    def drop_idle(self) -> None:
        """Drop the caches of released requests."""

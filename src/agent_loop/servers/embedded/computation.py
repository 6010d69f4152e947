"""What an engine needs from whatever computes its requests."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from agent_loop.servers.embedded.request import GenerationRequest

CacheKind: TypeAlias = Literal["shared", "per_request", "none"]
"""`shared`: one KV cache, all requests in one forward. `per_request`: the model's own cache and attention, one request
per forward. `none`: no cache, so that each token computes the whole sequence again."""


class StepOutput(NamedTuple):
    """Result of one step."""

    requests: tuple[GenerationRequest, ...]
    """The requests whose next token can be sampled; the others are still computing their prompts."""
    logits: Tensor
    """One row for each of `requests`, [rows, vocab]."""
    num_forwards: int
    num_prompt_tokens: int
    """Prompt tokens that the step computed."""


class Computation(Protocol):
    """Computes next-token logits for the requests of one engine, and owns their caches."""

    @property
    def kind(self) -> CacheKind: ...

    @property
    def resumes_turns(self) -> bool:
        """A session's next turn computes only the tokens that it adds."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory of the caches; 0 while they are freed."""
        ...

    @property
    def has_room(self) -> bool:
        """Another request can be admitted."""
        ...

    def allocate(self) -> None:
        """Allocate the caches, if they are freed."""
        ...

    def free(self) -> None:
        """Free the caches. No request may be admitted."""
        ...

    def admit(self, request: GenerationRequest) -> bool:
        """Start a request and set its `num_cached_tokens`; return False if it has to wait for another request.

        Raises:
            FeaturesError: An image of the request does not fit the model. The request is admitted all the same, and
                has to be released.
        """
        ...

    def step(self) -> StepOutput:
        """Compute the admitted requests; at least one is."""
        ...

    def append(self, request: GenerationRequest, token_id: int) -> None:
        """Add a sampled token, which the next step computes."""
        ...

    def release(self, request: GenerationRequest, *, discard: bool = False) -> None:
        """End an admitted request. Its cache is kept for the session's next turn, unless `discard` is set."""
        ...

    def restart(self, request: GenerationRequest) -> None:
        """Forget what is cached of an admitted request, so that the next step computes it under the new weights.

        Raises:
            FeaturesError: As `admit`.
        """
        ...

    def mark_stale(self, request: GenerationRequest) -> None:
        """Let an admitted request end on its cache of older weights, and keep that cache from other requests."""
        ...

    def end_session(self, session: str) -> None:
        """The session has no next turn."""
        ...

    def forget_idle(self) -> None:
        """Drop the caches of requests that have ended."""
        ...

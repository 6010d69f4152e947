"""What the backends of an engine have in common. A backend computes the logits of requests, and owns their caches."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

from agent_loop.servers.embedded.request import EngineRequest

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

"""Settings of the embedded engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from agent_loop.config import NotNegative, Replicas, Tokens
from agent_loop.errors import ConfigError

CONTEXT = "the context (rollout.prompt_length + rollout.response_length, or max_model_len)"
"""Name of `max_model_len` in error messages."""
ContextLength = Annotated[int, Field(ge=1, le=2**25)]


@dataclass(frozen=True, slots=True)
class EmbeddedConfig:
    """Settings of one embedded server."""

    max_slots: Replicas = 64
    """Largest number of running requests; further requests are queued. Each slot holds the KV cache of one sequence."""
    max_model_len: ContextLength = 2048
    """Largest number of tokens of prompt and completion. The cache has room for `max_slots * max_model_len` tokens."""
    prefill_chunk_tokens: Tokens = 512
    """Largest number of prompt tokens in one step. Limits how much prefill delays the decoding of other requests."""
    num_threads: Replicas = 1
    """CPU threads of one forward. More threads than free cores make it slower."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` uses the GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto` keeps the dtype of the model."""
    cache: Literal["auto", "shared", "per_request", "none"] = "auto"
    """`shared` computes all requests in one forward, over one KV cache. `per_request` computes one request at a time,
    with the model's own attention and cache. `none` computes the whole sequence again for each token. `auto` uses the
    fastest of them that is proved for the type of the model. `agent-loop check model` tests the others."""
    seed: NotNegative = 0
    """Seed for requests without a seed of their own; rollouts seed every completion. Replicas with the same seed sample
    the same tokens."""
    deterministic: bool = False
    """Compute each completion by itself from its first token. The same prompt, parameters and seed then give the same
    tokens and log-probs to the last bit, regardless of other requests. Uses a cache per completion, or none."""

    def __post_init__(self) -> None:
        for name in ("max_slots", "max_model_len", "prefill_chunk_tokens", "num_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"EmbeddedConfig.{name} is {getattr(self, name)}; give at least 1")
        if self.deterministic and self.cache == "shared":
            raise ConfigError(
                "EmbeddedConfig.cache is 'shared', but deterministic is true, and a shared cache depends on the order "
                "of the requests; leave cache out"
            )

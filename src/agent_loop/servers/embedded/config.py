"""The settings of the embedded engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from agent_loop.config import NotNegative, Replicas, Tokens
from agent_loop.errors import ConfigError

CONTEXT = "the context (rollout.prompt_length + rollout.response_length, or max_model_len)"
"""The user's name for `max_model_len`."""
ContextLength = Annotated[int, Field(ge=1, le=2**25)]


@dataclass(frozen=True, slots=True)
class EmbeddedConfig:
    """How one embedded server runs its model."""

    max_slots: Replicas = 64
    """Requests in the batch at once; more wait in line. Each slot holds the KV cache of one sequence."""
    max_model_len: ContextLength = 2048
    """Tokens of prompt and completion together. The cache is allocated for `max_slots * max_model_len` tokens."""
    prefill_chunk_tokens: Tokens = 512
    """Prompt tokens computed in one step, beside the decoding rows; bounds how long a step holds these up."""
    num_threads: Replicas = 1
    """CPU threads of one forward. More than the machine's free cores is slower, not faster."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is the GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto` keeps the type that the model comes in."""
    cache: Literal["auto", "shared", "per_request", "none"] = "auto"
    """`shared` computes all requests in one forward, over one KV cache. `per_request` computes one request at a time,
    with the model's own attention and cache. `none` computes the whole sequence again for each token. `auto` takes the
    first of them that gives the log-probs of a plain forward."""
    seed: NotNegative = 0
    """For requests that bring no seed; rollouts seed every completion themselves. Give each replica another one, or all
    of them sample alike."""
    deterministic: bool = False
    """Compute each completion by itself from its first token, so that the same prompt, parameters and seed give the
    same tokens and log-probs to the last bit, whatever runs beside it. Uses a cache per completion, or none."""
    recompute_kv_on_update: bool = False
    """After a weight update, compute the cache of requests in flight again under the new weights. Counts as a
    preemption."""
    offload_weights_on_sleep: bool = True
    """Move the weights to host memory while asleep; matters on a GPU only."""
    verify: bool = True
    """At construction, compare log-probs with a plain forward and refuse a model on which they differ."""

    def __post_init__(self) -> None:
        for name in ("max_slots", "max_model_len", "prefill_chunk_tokens", "num_threads"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"EmbeddedConfig.{name} is {value}; give at least 1")
        for name, options in (
            ("device", ("auto", "cpu", "cuda")),
            ("dtype", ("auto", "float32", "bfloat16")),
            ("cache", ("auto", "shared", "per_request", "none")),
        ):
            value = getattr(self, name)
            if value not in options:
                raise ConfigError(f"EmbeddedConfig.{name} is {value!r}; give one of {', '.join(options)}")
        if self.deterministic and self.cache == "shared":
            raise ConfigError(
                "EmbeddedConfig.cache is 'shared', but deterministic is true, and what requests share depends on when "
                "they come; leave cache out"
            )

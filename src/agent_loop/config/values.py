"""Types of settings, the base class of sections, and API keys from the environment."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from agent_loop.errors import ConfigError

MOST = 2**31 - 1
"""Largest integer of settings without a limit of their own."""

Positive = Annotated[int, Field(ge=1, le=MOST)]

NotNegative = Annotated[int, Field(ge=0, le=MOST)]

Seed = NotNegative

Tokens = Annotated[int, Field(ge=1, le=2**24)]
"""Length of sequences. Memory is reserved in proportion to it."""

Replicas = Annotated[int, Field(ge=1, le=10_000)]
"""Number of servers, workers, processes or threads."""

MAX_SAMPLES = 65_536

Samples = Annotated[int, Field(ge=1, le=MAX_SAMPLES)]
"""Trajectories per row."""

PositiveSeconds = Annotated[float, Field(gt=0, le=366 * 86_400)]
"""Seconds, at most a year. Clocks and timers overflow for much larger values."""

Share = Annotated[float, Field(ge=0, le=1)]

Coefficient = Annotated[float, Field(ge=0, le=1e6)]

Beta = Annotated[float, Field(ge=0, lt=1)]

LearningRate = Annotated[float, Field(gt=0, le=10)]

WeightTransfer: TypeAlias = Literal["auto", "shared_memory", "cuda_ipc", "broadcast", "disk"]

OnWeightUpdate: TypeAlias = Literal["auto", "keep", "abort"]

Name = Annotated[str, Field(min_length=1)]
"""Name of a registered function or class, or `file.py:name` or `module:name`."""

AggregationMode: TypeAlias = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

KLEstimator: TypeAlias = Literal["k1", "k2", "k3"]

Level: TypeAlias = Literal["token", "sequence"]

Divergence: TypeAlias = Literal["tv", "kl"]

TraceBackend: TypeAlias = Literal["file", "mlflow", "otel", "weave"]

Logger: TypeAlias = Literal["console", "mlflow", "tensorboard", "wandb"]


def _check_temperature(temperature: float) -> float:
    if 0 < temperature < LOWEST_TEMPERATURE:
        raise ValueError(f"give 0 (greedy) or at least {LOWEST_TEMPERATURE}")
    return temperature


def _check_top_k(top_k: int) -> int:
    if top_k == 0:
        raise ValueError("give -1 (no limit) or at least 1")
    return top_k


LOWEST_TEMPERATURE = 1e-4
"""Smaller temperatures overflow logits in float32."""

Temperature = Annotated[float, Field(ge=0, le=100), AfterValidator(_check_temperature)]

TopP = Annotated[float, Field(gt=0, le=1)]

TopK = Annotated[int, Field(ge=-1, le=MOST), AfterValidator(_check_top_k)]


class Section(BaseModel):
    """Group of settings. Unknown keys and numbers that are not finite are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


NO_KEY = "none"
"""Placeholder for endpoints without authentication, because the client requires a key."""


def read_api_key(variable: str | None) -> str:
    """Return the API key of an endpoint in an environment variable. Return a placeholder if `variable` is None."""
    if variable is None:
        return NO_KEY
    key = os.environ.get(variable, "")
    if not key:
        raise ConfigError(f"api_key_env is {variable!r}, but that environment variable is not set; set it")
    return key


class ChatEndpoint(Section):
    """A model at an endpoint with OpenAI's chat completions, such as `agent-loop serve`."""

    model: str
    """Name of the model at the endpoint."""
    base_url: str | None = None
    """URL such as `http://host:8000/v1`. None uses the environment variable OPENAI_BASE_URL, or OpenAI's API."""
    api_key_env: str | None = None
    """Environment variable that holds the API key. None if the endpoint needs no key."""
    temperature: Temperature | None = None
    """Sampling temperature. None uses the endpoint's default."""
    max_tokens: Tokens | None = 512
    """Maximum number of tokens in one reply. None uses the endpoint's default."""
    timeout_s: PositiveSeconds = 60.0
    """Time limit for one attempt."""
    max_retries: NotNegative = 3
    """Number of retries after a connection error, a timeout, or a status such as 429 or 500. The delay between attempts
    grows."""
    extra_body: dict[str, Any] = Field(default={})
    """Additional fields of each request."""

    def client_options(self) -> dict[str, Any]:
        """Return the arguments of `openai.AsyncOpenAI`."""
        return {
            "api_key": read_api_key(self.api_key_env),
            "base_url": self.base_url,
            "timeout": self.timeout_s,
            "max_retries": self.max_retries,
        }

    def request_options(self) -> dict[str, Any]:
        """Return the arguments of `chat.completions.create` that are set, without the messages."""
        options = {
            "model": self.model,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "extra_body": self.extra_body or None,
        }
        return {name: value for name, value in options.items() if value is not None}

"""Types of settings, the base class of sections, and API keys from the environment."""

from __future__ import annotations

import os
from typing import Annotated, Literal, TypeAlias

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

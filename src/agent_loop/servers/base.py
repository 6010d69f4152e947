"""The seam to an LLM engine: tokens in, tokens out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent_loop.attachments import Attachment
from agent_loop.config import ModelConfig
from agent_loop.errors import ConfigError
from agent_loop.types import IntArray, SamplingParams, TokenOutput

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ServerHealth:
    """What a server says of itself."""

    is_alive: bool
    num_running: int
    """Requests that hold a place in the engine's batch."""
    num_waiting: int
    """Requests that wait for a place."""
    weight_version: int
    detail: str = ""
    """Why it is not alive."""


class AsyncServerBase(ABC):
    """One LLM server. All methods are called on one event loop.

    Cancelling `generate` aborts the request: its place in the engine is free soon after, whatever the engine
    was doing.
    """

    name: str
    """Names the server in errors and metrics."""

    @classmethod
    def create(
        cls, *, name: str, model: ModelConfig, max_model_len: int, seed: int, engine_kwargs: Mapping[str, Any]
    ) -> AsyncServerBase:
        """Makes a server as a configuration asks for it.

        Args:
            model: What to load.
            max_model_len: Tokens of the longest context, prompt and response together.
            seed: Differs from replica to replica.
            engine_kwargs: `rollout.engine_kwargs`.

        Raises:
            ConfigError: This class cannot be made from a configuration, or an option is wrong.
        """
        raise ConfigError(f"{cls.__name__} cannot be named in a configuration: it does not define create()")

    @abstractmethod
    async def generate(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> TokenOutput:
        """Samples one completion.

        Args:
            prompt_ids: The whole context so far, shape [num_tokens]; read-only.
            sampling_params: How to sample. `max_tokens` None means as many as fit.
            request_id: The session: later turns of a conversation come with the same id, and a server may keep
                what it computed for the earlier ones. At most one call per session runs at a time.
            attachments: Everything attached to the context, counted from its first token, in order.

        Returns:
            The sampled tokens, stop token included, with log-probs as `TokenOutput.log_probs` defines them.

        Raises:
            ServerError: The engine failed, or refuses the request: it may take no attachments, or not these.
        """

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """Ends the running completion of a session: `generate` returns its tokens so far with stop reason
        `aborted`. Does nothing if none runs."""

    @abstractmethod
    async def end_session(self, request_id: str) -> None:
        """Tells that no turn of this session will follow, so that what was kept for it may go."""

    @abstractmethod
    async def wake_up(self) -> None:
        """Makes the server ready to generate: weights on the device, KV cache allocated."""

    @abstractmethod
    async def sleep(self) -> None:
        """Frees the KV cache and gives the device to the trainer. Generation while asleep is an error.

        Raises:
            ServerError: Requests are still running.
        """

    @abstractmethod
    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, weight_version: int
    ) -> None:
        """Replaces the model's weights between two decoding steps; later tokens are stamped with the version.

        Requests in flight go on. What was cached under the old weights is not reused by later requests.

        Raises:
            WeightsError: A name or a shape does not fit, or a weight is missing; nothing was changed.
        """

    @abstractmethod
    async def health(self) -> ServerHealth:
        """Tells whether the server works and how full it is."""

    @abstractmethod
    async def close(self) -> None:
        """Ends the server and what it runs on. Requests in flight fail with `ServerError`."""

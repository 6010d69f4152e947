"""The seam to an LLM engine: tokens in, tokens out."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any

from agent_loop.chat.template import ChatTemplate
from agent_loop.completions.chat import chat_completion, stream_chat_completion
from agent_loop.completions.requests import ChatCompletionRequest
from agent_loop.completions.response_models import ChatCompletion, ChatCompletionChunk
from agent_loop.config import ModelConfig, OnWeightUpdate, WeightTransfer
from agent_loop.errors import ConfigError, ServerError, WeightsError, did_you_mean
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenChunk, TokenOutput

if TYPE_CHECKING:
    import torch


class Ability(StrEnum):
    """What a server can do beyond generating tokens. `agent-loop check server` tests what a server claims."""

    LOG_PROBS = "logprobs"
    """Gives log-probs as `TokenOutput.logprobs` defines them."""
    TOP_LOGPROBS = "top_logprobs"
    """Returns the likeliest tokens and their log-probs, as `SamplingParams.top_logprobs` defines them."""
    SEED = "seed"
    """A seed makes a completion reproducible."""
    FREE_SEEDS = "free_seeds"
    """Seeds cost nothing, and a completion that was interrupted and is continued draws the tokens that it would have
    drawn without the interruption: see `SamplingParams.num_sampled`. Rollouts then seed every completion."""
    STREAMING = "streaming"
    """`stream` hands out tokens while the completion goes on."""
    PREFIX_REUSE = "prefix_reuse"
    """A later turn of a session does not compute its context again."""
    WEIGHT_UPDATE = "weight_update"
    """`update_weights` changes what is sampled from."""
    UPDATE_IN_FLIGHT = "update_in_flight"
    """Requests that run during `update_weights` go on under the new weights, each token stamped with its own."""
    SLEEP = "sleep"
    """`sleep` frees the KV cache and gives the device away."""
    ATTACHMENTS = "attachments"
    """Takes images and the like, if its model does."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """A server as a configuration asks for it."""

    name: str
    model: ModelConfig
    """What to load."""
    max_model_len: int
    """Tokens of the longest context, prompt and response together."""
    seed: int = 0
    """Differs from replica to replica."""
    deterministic: bool = False
    """Whether the same request must give the same tokens and log-probs to the last bit, whatever runs beside it."""
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """`rollout.engine_kwargs`: options by the engine's own names."""
    url: str | None = None
    """Where the server is, if it runs already."""
    start_timeout_s: float = 600.0
    """How long the engine may take to come up."""
    weight_transfer: WeightTransfer = "auto"
    """How new weights reach the engine's own processes."""
    on_weight_update: OnWeightUpdate = "auto"
    """What becomes of requests that run then."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Sampling parameters of the rollout. An engine that cannot offer them refuses to start."""


def refuse_unknown_options(given: Iterable[str], *, known: Iterable[str]) -> None:
    """Raises: ConfigError: A key of `rollout.engine_kwargs` is not one of the engine's."""
    known = list(known)
    for key in given:
        if key not in known:
            raise ConfigError(f"unknown key {f'rollout.engine_kwargs.{key}'!r}{did_you_mean(key, known)}")


ABILITY_FOR: Mapping[str, Ability] = {"seed": Ability.SEED, "top_logprobs": Ability.TOP_LOGPROBS}
"""Sampling parameters that need an ability if they differ from their default."""


def refuse_sampling_params(server: AsyncServerBase, params: SamplingParams) -> None:
    """Refuse a started server that lacks an ability for the sampling parameters of the rollout.

    Raises:
        ConfigError: An ability is missing.
    """
    usual = SamplingParams()
    for name, ability in ABILITY_FOR.items():
        value = getattr(params, name)
        if value != getattr(usual, name) and ability not in server.abilities:
            raise ConfigError(
                f"rollout.{name} is {value}, which server {server.name!r} ({type(server).__name__}) does not offer; "
                f"set rollout.{name}={getattr(usual, name)}, or choose another rollout.engine"
            )


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
    kv_cache_share: float | None = None
    """Of the KV cache, what running requests hold; None if it does not say. What is kept for later turns does not
    count, since it gives way."""


class AsyncServerBase(ABC):
    """One LLM server. All methods are called on one event loop.

    A subclass needs `generate` alone. Each other method has a default: what the method would do is then something that
    the server cannot do, and the servers' pool does without it.

    Cancelling `generate` aborts the request: its place in the engine is free soon after, whatever the engine
    was doing.
    """

    template: ChatTemplate | None = None
    """Of the model, for `chat_completion`; `AgentLoopManager` sets it."""
    abilities: frozenset[Ability] = frozenset()
    """Abilities that the server claims. `agent_loop.checks.check_server` tests them."""
    max_concurrent: int | None = None
    """Requests that it computes at once. The pool keeps the rest in line and gives them to whichever server has a place
    first; None gives the server all of them."""
    restarts: bool = False
    """Whether the server's process is started again by itself when it has died, as an actor of a cluster is."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raises: ConfigError: `end_session` is async, and would never run."""
        super().__init_subclass__(**kwargs)
        if inspect.iscoroutinefunction(cls.end_session):
            raise ConfigError(
                f"end_session of {cls.__name__} is async; make it a plain method, which tells and does not wait"
            )

    @cached_property
    def name(self) -> str:
        """Names the server in errors and metrics. Unique among the servers of a run."""
        return f"{type(self).__name__}-{next(_NUMBERS)}"

    @classmethod
    def create(cls, spec: ServerSpec) -> AsyncServerBase:
        """Make a server as a configuration asks for it.

        The default calls the class with `spec.engine_kwargs`, and gives the server the name of the specification.

        Raises:
            ConfigError: This class cannot be made from a configuration, or an option is wrong.
        """
        if spec.url is not None:
            raise ConfigError(
                f"{cls.__name__} cannot be used with rollout.server_urls: define create(spec), which reads spec.url"
            )
        make: Any = cls
        try:
            server: AsyncServerBase = make(**spec.engine_kwargs)
        except TypeError as error:
            raise ConfigError(
                f"{cls.__name__} cannot be made with rollout.engine_kwargs {dict(spec.engine_kwargs)}: {error}; give "
                "its constructor's arguments there, or define create(spec)"
            ) from error
        server.name = spec.name
        return server

    async def start(self) -> None:
        """Brings the engine up. Called once, before anything else.

        Raises:
            ConfigError: The engine refuses an option.
            ServerTimeout: It did not come up in time; the message ends with the engine's last log lines.
            ServerDied: It ended while it came up; the same.
        """

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
            The sampled tokens, stop token included, with log-probs as `TokenOutput.logprobs` defines them.

        Raises:
            SamplingParamsError: A parameter that this server does not offer.
            ServerError: The engine refuses the request: it may take no attachments, or not these.
            ServerDied: The engine is gone.
            BadServerReply: The engine answered what is no completion of this prompt.
        """

    async def stream(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> AsyncGenerator[TokenChunk]:
        """Samples one completion and yields it in parts; the last one has a stop reason.

        Arguments and errors are those of `generate`. Leaving the iteration early aborts the request. A server
        without the ability `STREAMING` yields everything at the end.
        """
        if attachments:
            output = await self.generate(prompt_ids, sampling_params, request_id, attachments=attachments)
        else:
            output = await self.generate(prompt_ids, sampling_params, request_id)
        for chunk in output.chunks:
            yield chunk

    async def chat_completion(
        self, request: ChatCompletionRequest | Mapping[str, Any], *, template: ChatTemplate
    ) -> ChatCompletion:
        """Answers an OpenAI chat request; with a `session_id` in it, the caller ends that session.

        Raises:
            RequestError: The request asks for what is unknown or not offered.
            ChatTemplateError: The template does not accept its messages.
            ServerError: As `generate`.
        """
        request = ChatCompletionRequest.read(request)
        return await chat_completion(request, template=template, sampler=self, session=request.session_id)

    async def stream_chat_completion(
        self, request: ChatCompletionRequest | Mapping[str, Any], *, template: ChatTemplate
    ) -> AsyncGenerator[ChatCompletionChunk]:
        """The same in parts, while the model speaks. Leaving the iteration early aborts the completions."""
        request = ChatCompletionRequest.read(request)
        chunks = stream_chat_completion(request, template=template, sampler=self, session=request.session_id)
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def abort(self, request_id: str) -> None:
        """End the running completion of a session: `generate` returns its tokens so far with stop reason `aborted`.

        Does nothing if none runs. A server without this method has its requests cancelled, and their tokens are lost.

        Raises:
            ServerError: The server cannot abort requests.
        """
        raise ServerError(f"{type(self).__name__} defines no abort", server=self.name, request_id=request_id)

    def end_session(self, request_id: str) -> None:
        """Note that no turn of this session will follow, so that what was kept for the session may go.

        Does not wait until it is gone; does nothing for a session that is not known.
        """

    async def wake_up(self) -> None:
        """Make the server ready to generate: weights on the device, KV cache allocated."""

    async def sleep(self) -> None:
        """Free the KV cache and give the device to the trainer. Generation while asleep is an error.

        Raises:
            ServerError: Requests are still running.
        """

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, weight_version: int
    ) -> None:
        """Replace the model's weights between two decoding steps; later tokens are stamped with the version.

        Requests in flight go on. What was cached under the old weights is not reused by later requests.

        Raises:
            WeightsError: A name or a shape does not fit, or a weight is missing, or the server cannot take weights;
                nothing was changed.
        """
        raise WeightsError(
            f"server {self.name} cannot take new weights, since {type(self).__name__} defines no update_weights; "
            "define it to train with this server"
        )

    async def health(self) -> ServerHealth:
        """Tell whether the server works and how full it is. A server without this method counts as well."""
        return ServerHealth(is_alive=True, num_running=0, num_waiting=0, weight_version=0)

    async def close(self) -> None:
        """End the server and what it runs on. Requests in flight fail with `ServerError`."""


_NUMBERS = count()

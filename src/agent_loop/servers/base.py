"""Interface of LLM servers: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any

from agent_loop.chat.template import ChatTemplate
from agent_loop.config import ModelConfig, OnWeightUpdate, WeightTransfer
from agent_loop.errors import (
    BadServerReply,
    ConfigError,
    SamplingParamsError,
    ServerError,
    WeightsError,
    did_you_mean,
)
from agent_loop.servers.scores import TokenScores
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenChunk, TokenOutput

if TYPE_CHECKING:
    import torch

    from agent_loop.serve.chat_requests import ChatCompletionRequest


class Ability(StrEnum):
    """Optional features of a server. `agent-loop check server` tests the abilities that a server claims."""

    LOG_PROBS = "logprobs"
    """Returns log-probs as `TokenOutput.log_probs` defines them."""
    TOP_LOGPROBS = "top_logprobs"
    """Returns the likeliest tokens and their log-probs, as `SamplingParams.top_logprobs` defines them."""
    JSON_SCHEMA = "json_schema"
    """Constrains completions to a schema, as `SamplingParams.json_schema` defines it."""
    PENALTIES = "penalties"
    """Offers `presence_penalty`, `frequency_penalty` and `repetition_penalty`."""
    MIN_P = "min_p"
    """Offers `min_p`."""
    SEED = "seed"
    """A seed makes a completion reproducible."""
    FREE_SEEDS = "free_seeds"
    """Seeds cost nothing, and an interruption does not change the sampled tokens: see `SamplingParams.num_sampled`.
    Rollouts then seed every completion."""
    STREAMING = "streaming"
    """`stream` yields tokens as they are sampled."""
    PREFIX_REUSE = "prefix_reuse"
    """A later turn of a session reuses the KV cache of its context."""
    WEIGHT_UPDATE = "weight_update"
    """`update_weights` replaces the weights of the model."""
    UPDATE_IN_FLIGHT = "update_in_flight"
    """Requests that run during `update_weights` continue under the new weights. Each token has its own version."""
    SLEEP = "sleep"
    """`sleep` frees the KV cache and releases the device."""
    ATTACHMENTS = "attachments"
    """Accepts attachments such as images, if the model supports them."""
    SCORE = "score"
    """`score` returns the log-probs of the tokens of a text."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """Specification of a server, from a configuration."""

    name: str
    model: ModelConfig
    """Model to load."""
    max_model_len: int
    """Largest number of tokens of a context, prompt and response together."""
    seed: int = 0
    """Seed of the server, different for each replica."""
    deterministic: bool = False
    """Whether a request must return bit-identical tokens and log-probs, regardless of concurrent requests."""
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options of the engine, from `rollout.engine_kwargs`."""
    url: str | None = None
    """URL of a server that is already running; None creates a server."""
    start_timeout_s: float = 600.0
    """Time limit of the start."""
    devices: tuple[str, ...] | None = None
    """Devices that the engine's processes see, as `CUDA_VISIBLE_DEVICES` lists them. Empty means none, and None means
    those of the process that starts the engine."""
    tensor_parallel_size: int = 1
    """Number of devices over which the engine splits the model."""
    shares_devices: bool = False
    """Whether the trainer uses the devices while the engine sleeps."""
    weight_transfer: WeightTransfer = "auto"
    """Transport of new weights to the engine's processes."""
    on_weight_update: OnWeightUpdate = "auto"
    """Whether a weight update keeps or aborts running requests."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Sampling parameters of the rollout. An engine that does not support them fails to start."""


def refuse_unknown_options(given: Iterable[str], *, known: Iterable[str]) -> None:
    """Refuse unknown keys of `rollout.engine_kwargs`."""
    known = list(known)
    for key in given:
        if key not in known:
            raise ConfigError(f"unknown key {f'rollout.engine_kwargs.{key}'!r}{did_you_mean(key, known)}")


ABILITY_FOR: Mapping[str, Ability] = {
    "seed": Ability.SEED,
    "top_logprobs": Ability.TOP_LOGPROBS,
    "json_schema": Ability.JSON_SCHEMA,
    "presence_penalty": Ability.PENALTIES,
    "frequency_penalty": Ability.PENALTIES,
    "repetition_penalty": Ability.PENALTIES,
    "min_p": Ability.MIN_P,
}
"""Sampling parameters that need an ability if they differ from their defaults."""
DEFAULT_PARAMS = SamplingParams()
HINTS: Mapping[str, str] = {
    "json_schema": ' (the embedded engine needs the tokenizer of the model, and: pip install "agent-loop[grammar]")'
}


def unsupported_params(params: SamplingParams, abilities: Collection[Ability]) -> list[str]:
    """Return the names of the sampling parameters that need an ability which is missing."""
    return [
        name
        for name, ability in ABILITY_FOR.items()
        if ability not in abilities and getattr(params, name) != getattr(DEFAULT_PARAMS, name)
    ]


def refuse_params_of_request(
    params: SamplingParams, *, abilities: Collection[Ability], server: str, resumes_schemas: bool = True
) -> None:
    """Refuse a request whose sampling parameters a server does not support.

    A seed is not refused here, because a server without seeds still samples a valid completion.

    Args:
        resumes_schemas: Whether a completion under a schema may have tokens that were sampled before the request.
    """
    if params.stop:
        raise SamplingParamsError(
            f"stop is {params.stop!r:.80}, which servers leave to their client; call AsyncLLMServerManager.generate"
        )
    for name in unsupported_params(params, abilities):
        if name != "seed":
            raise SamplingParamsError(
                f"{name} is {getattr(params, name)!r:.80}, which server {server!r} does not support; leave it out, or "
                f"use a server with the ability {ABILITY_FOR[name].value!r}{HINTS.get(name, '')}"
            )
    if params.json_schema and params.num_sampled and not resumes_schemas:
        raise SamplingParamsError(
            f"json_schema is set for a completion of which {params.num_sampled} tokens were sampled before, but the "
            f"grammars of server {server!r} begin with the request; sample the completion again from its start"
        )


def refuse_sampling_params(server: AsyncServerBase, params: SamplingParams) -> None:
    """Refuse sampling parameters that a started server does not support."""
    for name in unsupported_params(params, server.abilities):
        raise ConfigError(
            f"rollout.{name} is {getattr(params, name)}, which server {server.name!r} ({type(server).__name__}) does "
            f"not support; set rollout.{name}={getattr(DEFAULT_PARAMS, name)}, or choose another rollout.engine"
        )


@dataclass(frozen=True, slots=True)
class ServerHealth:
    """Health report of a server."""

    is_alive: bool
    num_running: int
    """Number of requests in the engine's batch."""
    num_waiting: int
    """Number of requests in the engine's queue."""
    weight_version: int
    detail: str = ""
    """Reason why the server is not alive."""
    kv_cache_share: float | None = None
    """Share of the KV cache that running requests use; None if unknown. Prefixes cached for later turns do not count,
    because they can be evicted."""


class AsyncServerBase:
    """Base class of LLM servers. All methods are called on one event loop.

    A subclass defines `stream`, or `generate` if it returns whole completions; each has a default that uses the other.
    Every other method has a default, which does nothing or raises an error; the pool works without those features.

    Cancelling `generate` aborts the request. The engine must free the slot of the request soon after.
    """

    template: ChatTemplate | None = None
    """Chat template of the model, for `chat_completion`. Set by `AgentLoopManager`."""
    abilities: frozenset[Ability] = frozenset()
    """Abilities that the server claims. `agent_loop.checks.check_server` tests them."""
    max_concurrent: int | None = None
    """Number of requests that the server computes concurrently. The pool queues the rest, and sends each to the first
    server with a free slot. None sets no limit."""
    restarts: bool = False
    """Whether the server's process restarts by itself after it died, as a Ray actor does."""

    @cached_property
    def name(self) -> str:
        """Name of the server in errors and metrics. Unique among the servers of a run."""
        return f"{type(self).__name__}-{next(_NUMBERS)}"

    @classmethod
    def create(cls, spec: ServerSpec) -> AsyncServerBase:
        """Create a server from its specification.

        The default calls the class with `spec.engine_kwargs` and sets the name of the server.

        Raises:
            ConfigError: The class cannot be created from a specification, or an option is invalid.
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
                f"{cls.__name__} cannot be created with rollout.engine_kwargs {dict(spec.engine_kwargs)}: {error}; set "
                "its constructor's arguments there, or define create(spec)"
            ) from error
        server.name = spec.name
        return server

    async def start(self) -> None:
        """Start the engine. Called once, before all other methods.

        Raises:
            ConfigError: The engine rejects an option.
            ServerTimeout: The engine did not start in time. The message ends with the engine's last log lines.
            ServerDied: The engine exited during the start. The message ends with the engine's last log lines.
        """

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> TokenOutput:
        """Sample one completion.

        Args:
            prompt_ids: The whole context so far, shape [num_tokens]; read-only.
            sampling_params: Sampling parameters. With `max_tokens` None, the context length is the only limit.
            request_id: Id of the session. Later turns of a conversation have the same id, so that a server can reuse
                the KV cache of earlier turns. At most one call per session runs at a time.
            attachments: All attachments of the context, in order, with positions counted from its first token.

        Returns:
            The sampled tokens, stop token included, with log-probs as `TokenOutput.log_probs` defines them.

        Raises:
            SamplingParamsError: The server does not support a parameter.
            ServerError: The engine rejects the request, for example because of its attachments.
            ServerDied: The engine has exited.
            BadServerReply: The engine's reply is not a completion of the prompt.
        """
        more: dict[str, Any] = {"attachments": attachments} if attachments else {}
        async with aclosing(self.stream(prompt_ids, sampling_params, request_id, **more)) as chunks:
            return TokenOutput.from_chunks([chunk async for chunk in chunks])

    async def stream(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> AsyncGenerator[TokenChunk]:
        """Sample one completion and yield its chunks. The last chunk has a stop reason.

        Arguments and errors are those of `generate`. Leaving the iteration early aborts the request. A server
        without the ability `STREAMING` yields all chunks at the end.
        """
        if type(self).generate is AsyncServerBase.generate:
            raise TypeError(f"{type(self).__name__} defines neither stream nor generate; define one of them")
        more: dict[str, Any] = {"attachments": attachments} if attachments else {}
        output: Any = await self.generate(prompt_ids, sampling_params, request_id, **more)
        if not isinstance(output, TokenOutput):
            raise BadServerReply(
                f"generate returned a {type(output).__name__}, not a TokenOutput", server=self.name
            )
        for chunk in output.chunks:
            yield chunk

    async def score(self, token_ids: IntArray, *, start: int = 1, top_logprobs: int = 0) -> TokenScores:
        """Return the log-probs of a text's tokens, each given all tokens before it, at temperature 1.

        Args:
            token_ids: The whole text, shape [num_tokens]; read-only.
            start: Index of the first token to score, at least 1, because nothing predicts the first token.
            top_logprobs: Number K of likeliest tokens to return at each place. With at least the size of the
                vocabulary, all its tokens are returned.

        Returns:
            Scores of the M = num_tokens - start last tokens.

        Raises:
            BadPrompt: The text is empty or too long, or an argument is out of range.
            ServerError: The server cannot score (it lacks the ability `SCORE`), or rejects the text.
            ServerDied: The engine has exited.
            BadServerReply: The engine's reply does not fit the text.
        """
        raise ServerError(
            f"{type(self).__name__} does not define score, so it cannot be a teacher", server=self.name
        )

    async def chat_completion(
        self, request: ChatCompletionRequest | Mapping[str, Any], *, template: ChatTemplate
    ) -> dict[str, Any]:
        """Return the body of the response to an OpenAI chat request.

        The caller ends the session of a request with `session_id`.

        Raises:
            RequestError: The request has an unknown or unsupported field.
            ChatTemplateError: The template does not accept the messages.
            ServerError: See `generate`.
        """
        from agent_loop.serve.chat import chat_completion  # late: `serve` is above this layer

        return await chat_completion(request, template=template, sampler=self)

    async def abort(self, request_id: str) -> None:
        """Abort the running completion of a session. `generate` returns the tokens so far, stop reason `aborted`.

        Does nothing if no completion is running. Requests of a server without this method are cancelled and lose
        their tokens.

        Raises:
            ServerError: The server cannot abort requests.
        """
        raise ServerError(
            f"{type(self).__name__} does not define abort", server=self.name, request_id=request_id
        )

    def end_session(self, request_id: str) -> None:
        """End a session: no turn will follow, and its cache may be freed.

        Returns without waiting. Does nothing for an unknown session.
        """

    async def wake_up(self) -> None:
        """Make the server ready to generate: weights on the device, KV cache allocated."""

    async def sleep(self) -> None:
        """Free the KV cache and release the device for the trainer. A sleeping server rejects requests.

        Raises:
            ServerError: Requests are still running.
        """

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, weight_version: int
    ) -> None:
        """Replace the model's weights between two decoding steps. Later tokens have the new weight version.

        In-flight requests continue. Later requests do not reuse caches of the old weights.

        Raises:
            WeightsError: A name or a shape does not fit, a weight is missing, or the server does not support weight
                updates. The weights are unchanged.
        """
        raise WeightsError(
            f"server {self.name} cannot update weights, because {type(self).__name__} does not define update_weights; "
            "define it to train with this server"
        )

    async def health(self) -> ServerHealth:
        """Return the health and the load of the server. A server without this method counts as alive."""
        return ServerHealth(is_alive=True, num_running=0, num_waiting=0, weight_version=0)

    async def close(self) -> None:
        """Close the server and free its resources. In-flight requests fail with `ServerError`."""


_NUMBERS = count()

"""Server with scripted completions, for tests of loops, tools and trainers without a model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from agent_loop.errors import ConfigError, ServerDied, ServerError
from agent_loop.loading import load_object
from agent_loop.servers.base import (
    Ability,
    AsyncServerBase,
    ServerHealth,
    ServerSpec,
    refuse_params_of_request,
)
from agent_loop.servers.prompt_limits import PromptLimits
from agent_loop.servers.scores import TokenScores, checked_text
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import (
    FloatArray,
    IntArray,
    SamplingParams,
    TokenArrays,
    TokenChunk,
    sliced,
)

if TYPE_CHECKING:
    import torch


NO_LIMIT = 2**31


@dataclass(frozen=True, slots=True, eq=False)
class ScriptedRequest:
    """Request that the server received."""

    prompt_ids: IntArray
    sampling_params: SamplingParams
    request_id: str
    turn: int
    """Number of earlier requests of the session."""
    attachments: tuple[Attachment, ...] = ()


@dataclass(frozen=True, slots=True)
class ScriptedReply:
    """Reply of the server to one request."""

    token_ids: Sequence[int]
    """Sampled tokens. They include the stop token if the model stops by itself."""
    logprobs: Sequence[float] | None = None
    """Log-prob of each token; None is -0.5 for each."""
    latency_s: float = 0.0
    """Seconds to the last token. Tokens are evenly spaced; with infinity, the request never ends."""
    error: str | None = None
    """Message of the `ServerError` that is raised after the latency; None raises no error."""
    stops: bool = True
    """Whether the stop reason is `stop`; otherwise it is `length`."""
    extras: TokenArrays = field(default_factory=dict[str, Any])
    """More values per token: arrays by name, shape [num_tokens, ...]."""


Script: TypeAlias = Callable[[ScriptedRequest], ScriptedReply] | Sequence[ScriptedReply]
"""Function from a request to its reply, or the replies to the turns of each session."""
Scorer: TypeAlias = Callable[[IntArray], FloatArray | Sequence[float]]
"""Function from the n tokens of a text to the log-probs of all tokens but the first, shape [n - 1], or to those of
every token of the vocabulary at their places, shape [n - 1, vocab_size]."""


class ScriptedServer(AsyncServerBase):
    """Server that follows a script. Limits, stop tokens, abort, sleep and weight versions work as in a real server.

    `requests` keeps every request, and `scored` every text to score, so that a test can compare the tokens that were
    sent with those recorded.
    """

    abilities = frozenset({Ability.UPDATE_IN_FLIGHT, Ability.SLEEP, Ability.ATTACHMENTS})

    def __init__(
        self,
        script: Script,
        *,
        name: str = "scripted-0",
        vocab_size: int | None = None,
        max_model_len: int | None = None,
        max_concurrent: int | None = None,
        streams: bool = False,
        more_abilities: Iterable[Ability] = (),
        scorer: Scorer | None = None,
    ) -> None:
        """Create a server that replies as scripted.

        Args:
            script: Function from a request to its reply, or the replies to the turns of each session.
            name: Name of the server in errors and metrics.
            vocab_size: Vocabulary size. Prompts with larger token ids are rejected; None allows any.
            max_model_len: Context length. Longer prompts are rejected; None sets no limit.
            max_concurrent: See `AsyncServerBase`.
            streams: Whether `stream` yields each token in its own chunk, as it is due.
            more_abilities: Abilities that the script provides, such as `Ability.JSON_SCHEMA`. Requests that need others
                are refused, as by a real server.
            scorer: Function that `score` calls with the whole text; None cannot score. The likeliest tokens need the
                log-probs of the whole vocabulary.
        """
        self.name = name
        self.max_concurrent = max_concurrent
        self.abilities = self.abilities | {*more_abilities}
        if streams:
            self.abilities |= {Ability.STREAMING}
        if scorer is not None:
            self.abilities |= {Ability.SCORE}
        self._scorer = scorer
        self.scored: list[IntArray] = []
        self._limits = PromptLimits(name, max_model_len or NO_LIMIT, vocab_size or NO_LIMIT)
        self.requests: list[ScriptedRequest] = []
        self._script = script
        self._turns: dict[str, int] = {}
        self._aborts: dict[str, asyncio.Event] = {}
        self._weight_version = 0
        self.is_asleep = False
        self._end_reason: str | None = None

    @classmethod
    def create(cls, spec: ServerSpec) -> ScriptedServer:
        """Create a server that follows the functions `script` and `scorer` in `engine_kwargs`, written as
        `file.py:name`. A server with a scorer needs no script.

        The other keys are arguments of the constructor.
        """
        kwargs = {"script": (), "name": spec.name, **spec.engine_kwargs}
        functions = {"script", "scorer"} & spec.engine_kwargs.keys()
        if not functions:
            raise ConfigError("a scripted server needs rollout.engine_kwargs.script: file.py:function")
        for name in functions:
            kwargs[name] = load_object(str(kwargs[name]), key=f"rollout.engine_kwargs.{name}")
        return cast(ScriptedServer, super().create(replace(spec, engine_kwargs=kwargs)))

    @property
    def num_sessions(self) -> int:
        """Number of sessions that have begun and not ended."""
        return len(self._turns)

    @property
    def num_running(self) -> int:
        return len(self._aborts)

    async def stream(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> AsyncGenerator[TokenChunk]:
        self._refuse_if_unable(prompt_ids, request_id)
        refuse_params_of_request(sampling_params, abilities=self.abilities, server=self.name)
        turn = self._turns.get(request_id, 0)
        request = ScriptedRequest(prompt_ids.copy(), sampling_params, request_id, turn, tuple(attachments))
        self.requests.append(request)
        self._turns[request_id] = turn + 1
        reply = self._reply_to(request)
        whole = _completion(reply, sampling_params)
        num_tokens, start, version = len(whole.token_ids), 0, self._weight_version
        began, seconds_per_token = asyncio.get_running_loop().time(), _seconds_per_token(reply)
        aborted = self._aborts[request_id] = asyncio.Event()
        takes_time = seconds_per_token > 0 or Ability.STREAMING in self.abilities
        try:
            for end in range(min(1, num_tokens) if takes_time else num_tokens, num_tokens + 1):
                was_aborted = await _wait_until(aborted, began + seconds_per_token * max(end, 1))
                if was_aborted or end == num_tokens:
                    self._fail_if_dead(request_id)
                if start < end - 1 and (was_aborted or self._weight_version != version):
                    yield replace(whole.part(start, end - 1), weight_version=version)
                    start = end - 1
                version = self._weight_version
                if was_aborted:
                    yield TokenChunk([], [], weight_version=version, stop_reason="aborted")
                    return
                if end == num_tokens and reply.error is not None:
                    raise ServerError(reply.error, server=self.name, request_id=request_id)
                if end == num_tokens or Ability.STREAMING in self.abilities:
                    yield replace(whole.part(start, end), weight_version=version)
                    start = end
        finally:
            del self._aborts[request_id]

    async def score(self, token_ids: IntArray, *, start: int = 1, top_logprobs: int = 0) -> TokenScores:
        if self._scorer is None:
            return await super().score(token_ids, start=start, top_logprobs=top_logprobs)
        self._fail_if_dead("")
        if self.is_asleep:
            raise ServerError("the server is asleep; call wake_up first", server=self.name)
        limits = self._limits
        text = checked_text(
            token_ids,
            start=start,
            top_logprobs=top_logprobs,
            server=self.name,
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
        )
        self.scored.append(text.copy())
        scored: NDArray[Any] = np.asarray(self._scorer(text), dtype=np.float32)
        if top_logprobs and scored.ndim == 1:
            raise ServerError(
                "the scorer returns the log-probs of the text's tokens only; return those of the whole vocabulary for "
                "top_logprobs",
                server=self.name,
            )
        return _scores_of(text[start:], scored[start - 1 :], top_logprobs=top_logprobs)

    async def abort(self, request_id: str) -> None:
        if request_id in self._aborts:
            self._aborts[request_id].set()

    def end_session(self, request_id: str) -> None:
        self._turns.pop(request_id, None)

    def die(self, reason: str = "the engine was killed") -> None:
        """Make all running and later calls fail, as after a `kill -9` of the engine."""
        self._end_reason = reason
        for aborted in self._aborts.values():
            aborted.set()

    def revive(self) -> None:
        """Restart a dead server, without sessions and with the initial weights."""
        self._end_reason = None
        self._turns.clear()
        self._weight_version = 0

    async def wake_up(self) -> None:
        self._fail_if_dead("")
        self.is_asleep = False

    async def sleep(self) -> None:
        if self._aborts:
            raise ServerError(f"{len(self._aborts)} requests are still running", server=self.name)
        self.is_asleep = True

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, weight_version: int
    ) -> None:
        self._fail_if_dead("")
        for _ in weights:
            pass
        self._weight_version = weight_version

    async def health(self) -> ServerHealth:
        return ServerHealth(
            is_alive=self._end_reason is None,
            num_running=len(self._aborts),
            num_waiting=0,
            weight_version=self._weight_version,
            detail=self._end_reason or "",
        )

    async def close(self) -> None:
        self.die("the server was closed")

    def _refuse_if_unable(self, prompt_ids: IntArray, request_id: str) -> None:
        self._fail_if_dead(request_id)
        problem = ""
        if self.is_asleep:
            problem = "the server is asleep; call wake_up first"
        elif request_id in self._aborts:
            problem = "a request of this session is already running"
        if problem:
            raise ServerError(problem, server=self.name, request_id=request_id)
        self._limits.check(request_id, prompt_ids=prompt_ids)

    def _fail_if_dead(self, request_id: str) -> None:
        if self._end_reason is not None:
            raise ServerDied(self._end_reason, server=self.name, request_id=request_id)

    def _reply_to(self, request: ScriptedRequest) -> ScriptedReply:
        if callable(self._script):
            return self._script(request)
        if request.turn >= len(self._script):
            raise ServerError(
                f"the script has {len(self._script)} replies, but the session sent request {request.turn + 1}",
                server=self.name,
                request_id=request.request_id,
            )
        return self._script[request.turn]


def _completion(reply: ScriptedReply, params: SamplingParams) -> TokenChunk:
    """Return the reply up to its first stop token or `max_tokens`."""
    token_ids = list(reply.token_ids)
    num_tokens, stop_reason = len(token_ids), ("stop" if reply.stops else "length")
    for position, token in enumerate(token_ids):
        if token in params.stop_token_ids:
            num_tokens, stop_reason = position + 1, "stop"
            break
    if params.max_tokens is not None and num_tokens > params.max_tokens:
        num_tokens, stop_reason = params.max_tokens, "length"
    logprobs = [-0.5] * len(token_ids) if reply.logprobs is None else list(reply.logprobs)
    return TokenChunk(
        token_ids=token_ids[:num_tokens],
        logprobs=logprobs[:num_tokens],
        stop_reason=stop_reason,
        prefill_s=_seconds_per_token(reply) if 0 < reply.latency_s < math.inf else None,
        extras=sliced(reply.extras, 0, num_tokens),
    )


def _scores_of(token_ids: IntArray, scored: NDArray[Any], *, top_logprobs: int) -> TokenScores:
    """Return the scores of tokens, from their log-probs, [M], or those of the whole vocabulary, [M, vocab]."""
    if scored.ndim == 1:
        return TokenScores(scored)
    logprobs = scored[np.arange(len(token_ids)), token_ids]
    if not top_logprobs:
        return TokenScores(logprobs)
    top_ids = np.argsort(-scored, axis=1, kind="stable")[:, :top_logprobs]
    return TokenScores(logprobs, top_ids.astype(np.int32), np.take_along_axis(scored, top_ids, axis=1))


def _seconds_per_token(reply: ScriptedReply) -> float:
    return reply.latency_s / max(len(reply.token_ids), 1)


async def _wait_until(event: asyncio.Event, when: float) -> bool:
    """Wait for an event until a time of the event loop. Return whether the event was set."""
    if when > asyncio.get_running_loop().time():
        try:
            async with asyncio.timeout_at(None if math.isinf(when) else when):
                await event.wait()
        except TimeoutError:
            pass
    return event.is_set()

"""One completion, from the engine's tokens to parts with text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

from agent_loop.chat.template import ChatTemplate
from agent_loop.completions.detokenizer import StopTextMatcher, StreamDetokenizer
from agent_loop.completions.response_models import Usage, usage_of
from agent_loop.errors import RequestError, ServerError
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, ServerStopReason, TokenChunk, TokenOutput


class Sampler(Protocol):
    """What samples: a server, or a pool of them. See `AsyncServerBase` for the methods."""

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> TokenOutput: ...

    def stream(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> AsyncGenerator[TokenChunk]: ...

    def end_session(self, request_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """One completion that is to be sampled."""

    prompt_ids: IntArray
    sampling_params: SamplingParams
    request_id: str
    attachments: Sequence[Attachment] = ()
    stops: Sequence[str] = ()
    """Texts before which it ends."""
    needs_logprobs: bool = False
    keeps_end_tokens: bool = False
    """The text includes the tokens that end the turn."""


@dataclass(frozen=True, slots=True)
class DecodedChunk:
    """What a step of sampling adds."""

    text: str
    """Without the token that ended the completion, unless it was to be kept."""
    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: ServerStopReason | None = None
    """Set on the last part."""
    num_cached_tokens: int | None = None
    stop_text: str | None = None
    """The text before which it ended, if it was one that ended it."""


@contextmanager
def completion_session(sampler: Sampler, session: str | None) -> Generator[str]:
    """The session of one completion: the caller's, who ends it, or one of its own, which ends with the body."""
    if session is not None:
        yield session
        return
    session = f"cmpl-{uuid4().hex}"
    try:
        yield session
    finally:
        sampler.end_session(session)


class UsageCounter:
    """Counts the tokens of a request."""

    def __init__(self, *, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0
        self._cached_tokens: int | None = None

    def add(self, part: DecodedChunk) -> None:
        self._completion_tokens += len(part.token_ids)
        if part.num_cached_tokens is not None:
            self._cached_tokens = max(self._cached_tokens or 0, part.num_cached_tokens)

    @property
    def usage(self) -> Usage:
        return usage_of(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            cached_tokens=self._cached_tokens,
        )


async def sample_decoded(
    wanted: SampleSpec, *, sampler: Sampler, template: ChatTemplate, is_streamed: bool
) -> AsyncGenerator[DecodedChunk]:
    """Samples one completion and yields it in parts; leaving the iteration aborts it.

    Args:
        is_streamed: Have the engine hand out tokens while it samples; else all come at once, which costs it less.

    Raises:
        RequestError: Log-probs are wanted and the server gives none.
        ServerError: The server refuses or fails the request, or somebody aborted it.
    """
    reader = ChunkDecoder(template, stops=wanted.stops, keeps_end_tokens=wanted.keeps_end_tokens)
    async with aclosing(_chunks(wanted, sampler=sampler, is_streamed=is_streamed)) as chunks:
        async for chunk in chunks:
            if wanted.needs_logprobs and chunk.logprobs is None:
                raise missing_logprobs()
            for part in reader.feed(chunk):
                yield part
                if part.finish_reason is not None:
                    return


def missing_logprobs() -> RequestError:
    """The answer to a request for log-probs that the server does not give."""
    return RequestError("logprobs: this server gives none; leave it out", param="logprobs")


class ChunkDecoder:
    """Reads one completion chunk by chunk.

    Args:
        template: Of the model.
        stops: Texts before which the completion ends.
        keeps_end_tokens: See `SampleSpec`.
    """

    def __init__(
        self, template: ChatTemplate, *, stops: Sequence[str] = (), keeps_end_tokens: bool = False
    ) -> None:
        self._text = _VisibleText(template, keeps_end_tokens=keeps_end_tokens)
        self._stops = StopTextMatcher(stops)
        self._has_stops = bool(stops)

    def feed(self, chunk: TokenChunk) -> Iterator[DecodedChunk]:
        """The parts that the chunk adds; behind one with a finish reason nothing comes any more."""
        # A stop text ends the completion at the token that completes it, so it is looked for token by token.
        for piece in chunk.single_tokens() if self._has_stops else (chunk,):
            added = self._text.feed(piece.token_ids)
            if piece.stop_reason is not None:
                added += self._text.finish(stopped=piece.stop_reason == "stop")
            added = self._stops.feed(added)
            reason = "stop" if self._stops.is_hit else piece.stop_reason
            if reason is not None:
                added += self._stops.finish()
            yield DecodedChunk(
                added,
                piece.token_ids,
                piece.logprobs,
                reason,
                piece.num_cached_tokens,
                stop_text=self._stops.hit,
            )
            if reason is not None:
                return


async def _chunks(wanted: SampleSpec, *, sampler: Sampler, is_streamed: bool) -> AsyncGenerator[TokenChunk]:
    # A server that knows of no attachments need not take the argument.
    more: dict[str, Any] = {"attachments": wanted.attachments} if wanted.attachments else {}
    asked = (wanted.prompt_ids, wanted.sampling_params, wanted.request_id)
    if not is_streamed and not wanted.stops:
        for chunk in (await sampler.generate(*asked, **more)).chunks:
            yield _unless_aborted(chunk, wanted.request_id)
        return
    async with aclosing(sampler.stream(*asked, **more)) as chunks:
        async for chunk in chunks:
            yield _unless_aborted(chunk, wanted.request_id)


def _unless_aborted(chunk: TokenChunk, request_id: str) -> TokenChunk:
    if chunk.stop_reason == "aborted":
        raise ServerError("the completion was aborted on the server; send it again", request_id=request_id)
    return chunk


class _VisibleText:
    """The text of a completion without the tokens that end it, which are known to do so only at the end."""

    def __init__(self, template: ChatTemplate, *, keeps_end_tokens: bool) -> None:
        self._stream = StreamDetokenizer(template.encoder.decode)
        self._end_ids = template.end_ids
        special_ids = frozenset[int](template.tokenizer.all_special_ids)
        self._may_end = frozenset[int]() if keeps_end_tokens else self._end_ids | special_ids
        self._pending: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> str:
        tokens = [*self._pending, *token_ids]
        num_shown = len(tokens)
        while num_shown and tokens[num_shown - 1] in self._may_end:
            num_shown -= 1
        self._pending = tokens[num_shown:]
        return self._stream.feed(tokens[:num_shown]) if num_shown else ""

    def finish(self, *, stopped: bool) -> str:
        """What was held back; the token at which the engine stopped is no part of it."""
        if stopped and self._pending and self._pending[-1] not in self._end_ids:
            self._pending.pop()
        while self._pending and self._pending[-1] in self._end_ids:
            self._pending.pop()
        return self._stream.feed(self._pending) + self._stream.finish()

"""Samples one completion and decodes it to text, chunk by chunk."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from uuid import uuid4

from agent_loop.chat.detokenizer import MAX_CONTEXT_TOKENS, StopTextMatcher, StreamDetokenizer
from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import RequestError, ServerError
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import (
    IntArray,
    SamplingParams,
    ServerStopReason,
    TokenChunk,
    TokenIds,
    TokenOutput,
)


class Sampler(Protocol):
    """A server or a pool of servers. `AsyncServerBase` describes the methods."""

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
    """Request for one completion."""

    prompt_ids: IntArray
    sampling_params: SamplingParams
    request_id: str
    attachments: Sequence[Attachment] = ()
    stops: Sequence[str] = ()
    """Texts before which the completion ends."""
    needs_logprobs: bool = False
    keeps_end_tokens: bool = False
    """Whether the text includes the tokens that end the turn."""
    prefix: TokenIds = ()
    """Last tokens of the prompt that belong to the assistant's turn."""
    ends_after: Callable[[Sequence[int]], bool] | None = None
    """Called with the next tokens; returns whether the completion ends with them."""


@dataclass(frozen=True, slots=True)
class DecodedChunk:
    """Sampled tokens with their text."""

    text: str
    """Text of the tokens, without the end token unless `keeps_end_tokens` is set."""
    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: ServerStopReason | None = None
    """Set on the last chunk."""
    num_cached_tokens: int | None = None
    stop_text: str | None = None
    """Stop text that ended the completion; None if none did."""
    top_logprobs: Sequence[Sequence[tuple[int, float]]] | None = None
    """Likeliest tokens and their log-probs, for each token; None if they were not asked for."""


@contextmanager
def completion_session(sampler: Sampler, session: str | None) -> Generator[str]:
    """Yield the session id of one completion.

    The caller ends a session that it passes. If it passes None, a new session is created and ended on exit.
    """
    if session is not None:
        yield session
        return
    session = f"cmpl-{uuid4().hex}"
    try:
        yield session
    finally:
        sampler.end_session(session)


async def sample_decoded(
    spec: SampleSpec, *, sampler: Sampler, template: ChatTemplate, is_streamed: bool
) -> AsyncGenerator[DecodedChunk]:
    """Sample one completion and yield it in chunks. Closing the iterator aborts the completion.

    Args:
        spec: The completion to sample.
        sampler: Samples the tokens.
        template: Chat template of the model, which decodes the tokens.
        is_streamed: Whether the server returns tokens while it samples. Returning all tokens at the end is cheaper.
    """
    decoder = ChunkDecoder(
        template,
        stops=spec.stops,
        keeps_end_tokens=spec.keeps_end_tokens,
        prefix=spec.prefix,
        ends_after=spec.ends_after,
    )
    async with aclosing(_token_chunks(spec, sampler=sampler, is_streamed=is_streamed)) as chunks:
        async for chunk in chunks:
            if spec.needs_logprobs and chunk.logprobs is None:
                raise missing_logprobs_error()
            for decoded in decoder.feed(chunk):
                yield decoded
                if decoded.finish_reason is not None:
                    return


def missing_logprobs_error() -> RequestError:
    """Return the error for a request for log-probs if the server returns none."""
    return RequestError("logprobs: the server returns no log-probs; leave it out", param="logprobs")


class ChunkDecoder:
    """Decodes the tokens of one completion, and ends it at a stop text.

    Args:
        template: Chat template of the model.
        stops: Texts before which the completion ends.
        keeps_end_tokens: Whether the text includes the tokens that end the turn.
        prefix: Tokens of the turn before the completion. Some decoders treat the first word differently.
        ends_after: Called with the next tokens; returns whether the completion ends with them.
    """

    def __init__(
        self,
        template: ChatTemplate,
        *,
        stops: Sequence[str] = (),
        keeps_end_tokens: bool = False,
        prefix: TokenIds = (),
        ends_after: Callable[[Sequence[int]], bool] | None = None,
    ) -> None:
        self._text = _VisibleText(template, keeps_end_tokens=keeps_end_tokens, prefix=prefix)
        self._stops = StopTextMatcher(stops)
        self._ends_after = ends_after
        self._is_token_by_token = bool(stops) or ends_after is not None

    def feed(self, chunk: TokenChunk) -> Iterator[DecodedChunk]:
        """Decode a chunk, and yield the result. A result with a finish reason is the last one."""
        # A stop text ends the completion at the token that completes it, so tokens are decoded one by one.
        for piece in chunk.single_tokens() if self._is_token_by_token else (chunk,):
            is_last = self._ends_after is not None and self._ends_after(piece.token_ids)
            text = self._text.feed(piece.token_ids)
            if piece.stop_reason is not None or is_last:
                text += self._text.finish(stopped=piece.stop_reason == "stop")
            text = self._stops.feed(text)
            reason = "stop" if self._stops.is_hit or is_last else piece.stop_reason
            if reason is not None:
                text += self._stops.finish()
            yield DecodedChunk(
                text,
                piece.token_ids,
                piece.logprobs,
                reason,
                piece.num_cached_tokens,
                stop_text=self._stops.hit,
                top_logprobs=_top_logprobs(piece),
            )
            if reason is not None:
                return


async def _token_chunks(
    spec: SampleSpec, *, sampler: Sampler, is_streamed: bool
) -> AsyncGenerator[TokenChunk]:
    # Servers without support for attachments may lack the argument.
    more: dict[str, Any] = {"attachments": spec.attachments} if spec.attachments else {}
    asked = (spec.prompt_ids, spec.sampling_params, spec.request_id)
    if not is_streamed and not spec.stops and spec.ends_after is None:
        for chunk in (await sampler.generate(*asked, **more)).chunks:
            yield _unless_aborted(chunk, spec.request_id)
        return
    async with aclosing(sampler.stream(*asked, **more)) as chunks:
        async for chunk in chunks:
            yield _unless_aborted(chunk, spec.request_id)


def _unless_aborted(chunk: TokenChunk, request_id: str) -> TokenChunk:
    if chunk.stop_reason == "aborted":
        raise ServerError("the completion was aborted on the server; send it again", request_id=request_id)
    return chunk


def _top_logprobs(chunk: TokenChunk) -> list[list[tuple[int, float]]] | None:
    ids, logprobs = chunk.extras.get("top_token_ids"), chunk.extras.get("top_logprobs")
    if ids is None or logprobs is None:
        return None
    return [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), logprobs.tolist(), strict=True)]


class _VisibleText:
    """Decodes a completion without its end tokens.

    Control tokens are held back, because only the end of the completion shows whether they are end tokens.
    """

    def __init__(self, template: ChatTemplate, *, keeps_end_tokens: bool, prefix: TokenIds) -> None:
        self._stream = StreamDetokenizer(template.encoder.decode)
        if len(prefix):
            self._stream.feed([int(token) for token in prefix[-MAX_CONTEXT_TOKENS:]])
        self._without_end = partial(template.without_end, keeps_close=keeps_end_tokens)
        self._may_end = template.text_end_ids(stopped=True, keeps_close=keeps_end_tokens)
        self._pending: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> str:
        tokens = [*self._pending, *token_ids]
        num_shown = len(tokens)
        while num_shown and tokens[num_shown - 1] in self._may_end:
            num_shown -= 1
        self._pending = tokens[num_shown:]
        return self._stream.feed(tokens[:num_shown]) if num_shown else ""

    def finish(self, *, stopped: bool) -> str:
        """Return the text that was held back, without the token at which the server stopped."""
        return self._stream.feed(self._without_end(self._pending, stopped=stopped)) + self._stream.finish()

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
        *,
        request_id: str,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        attachments: Sequence[Attachment] = (),
    ) -> TokenOutput: ...

    def stream(
        self,
        *,
        request_id: str,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        attachments: Sequence[Attachment] = (),
    ) -> AsyncGenerator[TokenChunk]: ...

    def end_session(self, request_id: str) -> None: ...


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

    @classmethod
    def joined(cls, chunks: Sequence[DecodedChunk]) -> DecodedChunk:
        """Return the chunks of one completion as one chunk."""
        has_tops = chunks[0].top_logprobs is not None
        return cls(
            text="".join(chunk.text for chunk in chunks),
            token_ids=[token for chunk in chunks for token in chunk.token_ids],
            logprobs=[logprob for chunk in chunks for logprob in chunk.logprobs or ()],
            finish_reason=chunks[-1].finish_reason,
            stop_text=chunks[-1].stop_text,
            top_logprobs=[top for chunk in chunks for top in chunk.top_logprobs or ()] if has_tops else None,
        )


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


async def token_chunks(
    sampler: Sampler,
    prompt_ids: IntArray,
    sampling_params: SamplingParams,
    request_id: str,
    *,
    attachments: Sequence[Attachment] = (),
    is_streamed: bool,
) -> AsyncGenerator[TokenChunk]:
    """Sample one completion and yield its tokens. Closing the iterator aborts the completion.

    Without `is_streamed`, the server returns all tokens at the end, which is cheaper.
    """
    request: dict[str, Any] = {
        "request_id": request_id,
        "prompt_ids": prompt_ids,
        "sampling_params": sampling_params,
    }
    if attachments:  # servers without support for attachments may lack the argument
        request["attachments"] = attachments
    if not is_streamed:
        output = await sampler.generate(**request)
        for chunk in output.chunks:
            yield _unless_aborted(chunk, request_id)
        return
    async with aclosing(sampler.stream(**request)) as chunks:
        async for chunk in chunks:
            yield _unless_aborted(chunk, request_id)


def _unless_aborted(chunk: TokenChunk, request_id: str) -> TokenChunk:
    if chunk.stop_reason == "aborted":
        raise ServerError("the completion was aborted on the server; send it again", request_id=request_id)
    return chunk


class ChunkDecoder:
    """Decodes the tokens of one completion, and ends it at a stop text.

    Args:
        template: Chat template of the model.
        stops: Texts before which the completion ends.
        keeps_end_tokens: Whether the text includes the tokens that end the turn.
        prefix: Tokens of the turn before the completion. Some decoders treat the first word differently.
        ends_after: Called with the next tokens; returns whether the completion ends with them.
        needs_logprobs: Whether tokens without log-probs are refused.
    """

    def __init__(
        self,
        template: ChatTemplate,
        *,
        stops: Sequence[str] = (),
        keeps_end_tokens: bool = False,
        prefix: TokenIds = (),
        ends_after: Callable[[Sequence[int]], bool] | None = None,
        needs_logprobs: bool = False,
    ) -> None:
        self._needs_logprobs = needs_logprobs
        self._text = _VisibleText(template, keeps_end_tokens=keeps_end_tokens, prefix=prefix)
        self._stops = StopTextMatcher(stops)
        self._ends_after = ends_after
        self.is_token_by_token = bool(stops) or ends_after is not None
        """Whether the completion may end at any token, so that the server has to stream it."""

    def feed(self, chunk: TokenChunk) -> Iterator[DecodedChunk]:
        """Decode a chunk, and yield the result. A result with a finish reason is the last one."""
        if self._needs_logprobs and chunk.logprobs is None:
            raise RequestError("logprobs: the server returns no log-probs; leave it out", param="logprobs")
        # A stop text ends the completion at the token that completes it, so tokens are decoded one by one.
        for piece in chunk.single_tokens() if self.is_token_by_token else (chunk,):
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

"""Samples the completions of a request, and reads their tokens chunk by chunk."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias
from uuid import uuid4

from agent_loop.chat.detokenizer import MAX_CONTEXT_TOKENS, StopTextMatcher, StreamDetokenizer
from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import RequestError, ServerError
from agent_loop.serve.stream_parser import ContinuedParser, ParsedDelta, StreamParser
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import (
    IntArray,
    SamplingParams,
    ServerStopReason,
    TokenChunk,
    TokenIds,
    TokenOutput,
    ToolCall,
)

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


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
class ReplyHead:
    """Fields that all chunks of a completion share."""

    prompt_ids: IntArray
    """Tokens before the first sampled one."""
    id: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True, slots=True)
class ReplyChunk:
    """Chunk of one of a request's completions, decoded and parsed."""

    head: ReplyHead
    index: int
    """Index of the completion."""
    tokens: TokenChunk
    delta: ParsedDelta
    calls: Mapping[str, ToolCall] = field(default_factory=dict[str, ToolCall])
    """The delta's calls by their ids."""
    end: ServerStopReason | None = None
    """Why the completion ended. Set on the last chunk."""
    stop_text: str | None = None
    """Stop text that ended the completion; None if none did."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason why the completion ended; None if it did not."""
        match self.end:
            case None:
                return None
            case "length":
                return "length"
            case _:
                return "tool_calls" if self.calls else "stop"

    @property
    def top_logprobs(self) -> Sequence[Sequence[tuple[int, float]]]:
        """Likeliest tokens and their log-probs, for each token; empty if the server sent none."""
        ids, logprobs = self.tokens.extras.get("top_token_ids"), self.tokens.extras.get("top_logprobs")
        if ids is None or logprobs is None:
            return []
        return [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), logprobs.tolist(), strict=True)]

    @classmethod
    def joined(cls, chunks: Sequence[ReplyChunk]) -> ReplyChunk:
        """Return the chunks of one completion as one chunk."""
        return cls(
            chunks[0].head,
            chunks[0].index,
            TokenChunk.joined([chunk.tokens for chunk in chunks]),
            ParsedDelta.joined([chunk.delta for chunk in chunks]),
            {call_id: call for chunk in chunks for call_id, call in chunk.calls.items()},
            chunks[-1].end,
            chunks[-1].stop_text,
        )


def by_choice(chunks: Sequence[ReplyChunk]) -> list[ReplyChunk]:
    """Return each of a request's completions as one chunk."""
    indices = sorted({chunk.index for chunk in chunks})
    return [ReplyChunk.joined([chunk for chunk in chunks if chunk.index == index]) for index in indices]


class CompletionReader:
    """Reads the tokens of one completion, and ends it at a stop text.

    Args:
        template: Chat template of the model.
        head: Head of the completion's chunks.
        index: Index of the completion.
        parser: Parser of an assistant's turn; None for plain text.
        stops: Texts before which the completion ends.
        prefix: Tokens of the turn before the completion. Some decoders treat the first word differently.
        before: Part of the response that the prefix makes.
        ends_after: Called with the next tokens; returns whether the completion ends with them.
        needs_logprobs: Whether tokens without log-probs are refused.
        new_call_id: Returns the id of a call for its position in the completion, unless the model gave it one.
    """

    def __init__(
        self,
        template: ChatTemplate,
        head: ReplyHead,
        *,
        index: int,
        parser: StreamParser | ContinuedParser | None = None,
        stops: Sequence[str] = (),
        prefix: TokenIds = (),
        before: ParsedDelta | None = None,
        ends_after: Callable[[Sequence[int]], bool] | None = None,
        needs_logprobs: bool = False,
        new_call_id: Callable[[int], str] = lambda _: f"call_{uuid4().hex[:24]}",
    ) -> None:
        self.head = head
        self.is_token_by_token = bool(stops) or ends_after is not None
        """Whether the completion may end at any token, so that the server has to stream it."""
        self._index = index
        self._parser = parser
        self._before = before or ParsedDelta()
        self._stops = StopTextMatcher(stops)
        self._ends_after = ends_after
        self._needs_logprobs = needs_logprobs
        self._new_call_id = new_call_id
        self._detokenizer = StreamDetokenizer(template.encoder.decode)
        if len(prefix):
            self._detokenizer.feed([int(token) for token in prefix[-MAX_CONTEXT_TOKENS:]])
        keeps_close = parser is not None and template.tool_parser.reads_end_tokens
        self._without_end = partial(template.without_end, keeps_close=keeps_close)
        self._may_end = template.text_end_ids(stopped=True, keeps_close=keeps_close)
        self._pending: list[int] = []
        """Control tokens that may be the end of the turn. Only the end of the completion shows whether they are."""

    def read(self, chunk: TokenChunk) -> Iterator[ReplyChunk]:
        """Read a chunk, and yield the result. A result with an end is the last one.

        Raises `RequestError` if the request asks for log-probs and the server returns none.
        """
        if self._needs_logprobs and chunk.logprobs is None:
            raise RequestError("logprobs: the server returns no log-probs; leave it out", param="logprobs")
        # A stop text ends the completion at the token that completes it, so tokens are decoded one by one.
        for piece in chunk.single_tokens() if self.is_token_by_token else (chunk,):
            is_last = self._ends_after is not None and self._ends_after(piece.token_ids)
            text = self._decode(piece.token_ids)
            if piece.stop_reason is not None or is_last:
                rest = self._without_end(self._pending, stopped=piece.stop_reason == "stop")
                text += self._detokenizer.feed(rest) + self._detokenizer.finish()
            text = self._stops.feed(text)
            end = "stop" if self._stops.is_hit or is_last else piece.stop_reason
            if end is not None:
                text += self._stops.finish()
            delta, self._before = self._before + self._parse(text, is_end=end is not None), ParsedDelta()
            calls = self._with_ids(delta.tool_calls)
            yield ReplyChunk(self.head, self._index, piece, delta, calls, end, self._stops.hit)
            if end is not None:
                return

    def _decode(self, token_ids: Sequence[int]) -> str:
        tokens = [*self._pending, *token_ids]
        num_shown = len(tokens)
        while num_shown and tokens[num_shown - 1] in self._may_end:
            num_shown -= 1
        self._pending = tokens[num_shown:]
        return self._detokenizer.feed(tokens[:num_shown]) if num_shown else ""

    def _parse(self, text: str, *, is_end: bool) -> ParsedDelta:
        if self._parser is None:
            return ParsedDelta(text)
        delta = self._parser.feed(text)
        return delta + self._parser.finish() if is_end else delta

    def _with_ids(self, calls: Sequence[ToolCall]) -> dict[str, ToolCall]:
        """Return each call by a unique id, which is the model's own id if there is one."""
        named: dict[str, ToolCall] = {}
        for position, call in enumerate(calls):
            named[call.id if call.id and call.id not in named else self._new_call_id(position)] = call
        return named


async def sample_completion(
    reader: CompletionReader,
    params: SamplingParams,
    *,
    sampler: Sampler,
    session: str | None,
    is_streamed: bool | None,
    attachments: Sequence[Attachment] = (),
) -> AsyncGenerator[ReplyChunk]:
    """Sample one completion, and yield its chunks. Closing the iterator aborts the completion.

    Args:
        reader: Reader of the completion, whose head has the prompt.
        params: Sampling parameters.
        sampler: A server or a pool of servers.
        session: Session id, which the caller ends. If it is None, the completion has a session of its own.
        is_streamed: Whether chunks are needed as they are sampled. All of them at the end are cheaper.
        attachments: Attachments of the prompt.
    """
    session_id = session or f"cmpl-{uuid4().hex}"
    request: dict[str, Any] = {
        "request_id": session_id,
        "prompt_ids": reader.head.prompt_ids,
        "sampling_params": params,
    }
    if attachments:  # servers without support for attachments may lack the argument
        request["attachments"] = attachments
    is_streamed = is_streamed or reader.is_token_by_token
    chunks = sampler.stream(**request) if is_streamed else _chunks_of(sampler.generate(**request))
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                if chunk.stop_reason == "aborted":
                    raise ServerError(
                        "the completion was aborted on the server; send it again", request_id=session_id
                    )
                for read in reader.read(chunk):
                    yield read
                    if read.end is not None:
                        return
    finally:
        if session is None:
            sampler.end_session(session_id)


async def _chunks_of(completion: Awaitable[TokenOutput]) -> AsyncGenerator[TokenChunk]:
    for chunk in (await completion).chunks:
        yield chunk

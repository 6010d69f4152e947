"""Parsed chunks of completions, and the writer of replies of the chat completions API."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias
from uuid import uuid4

from pydantic_core import to_json

from agent_loop.chat.byte_level import bytes_of_name
from agent_loop.chat.template import ChatTemplate
from agent_loop.serve.chat_requests import ChatCompletionRequest
from agent_loop.serve.errors import ErrorReply
from agent_loop.serve.fields import without_none
from agent_loop.serve.sampling import DecodedChunk
from agent_loop.serve.stream_parser import ParsedDelta
from agent_loop.types import IntArray, ToolCall

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]
JsonObject: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """Fields that all chunks of a completion share."""

    prompt_ids: IntArray
    """Tokens before the first sampled one."""
    id: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True, slots=True)
class ParsedChunk:
    """Chunk of one of a request's completions, decoded and parsed."""

    head: ReplyHead
    index: int
    """Index of the completion."""
    decoded: DecodedChunk
    delta: ParsedDelta
    calls: Mapping[str, ToolCall] = field(default_factory=dict[str, ToolCall])
    """The delta's calls by their ids."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason why the completion ended; None if it did not."""
        match self.decoded.finish_reason:
            case None:
                return None
            case "length":
                return "length"
            case _:
                return "tool_calls" if self.calls else "stop"


def joined(chunks: Sequence[ParsedChunk]) -> ParsedChunk:
    """Return the chunks of one completion as one chunk."""
    calls = {call_id: call for chunk in chunks for call_id, call in chunk.calls.items()}
    decoded = DecodedChunk.joined([chunk.decoded for chunk in chunks])
    delta = ParsedDelta.joined([chunk.delta for chunk in chunks])
    return ParsedChunk(chunks[0].head, chunks[0].index, decoded, delta, calls)


def by_choice(chunks: Sequence[ParsedChunk]) -> list[ParsedChunk]:
    """Return each of a request's completions as one chunk."""
    indices = sorted({chunk.index for chunk in chunks})
    return [joined([chunk for chunk in chunks if chunk.index == index]) for index in indices]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request. A prompt counts once, its completions are summed."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int | None = None
    """Tokens of the prompt that were in the server's prefix cache; None if the server does not say."""

    @classmethod
    def of(cls, chunks: Sequence[ParsedChunk]) -> Usage:
        """Return the token counts of a request from the chunks of all of its completions."""
        cached = [c.decoded.num_cached_tokens for c in chunks if c.decoded.num_cached_tokens is not None]
        return cls(
            prompt_tokens=len(chunks[0].head.prompt_ids),
            completion_tokens=sum(len(chunk.decoded.token_ids) for chunk in chunks),
            cached_tokens=max(cached) if cached else None,
        )

    def as_openai(self) -> JsonObject:
        """Return the counts in the form of the chat completions API."""
        details = {"prompt_tokens_details": {"cached_tokens": self.cached_tokens}}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            **({} if self.cached_tokens is None else details),
        }


class ReplyWriter(Protocol):
    """Writes the reply to one request in the format of its API, either whole or as server-sent events."""

    def whole(self, chunks: Sequence[ParsedChunk], /) -> Mapping[str, Any]:
        """Return the reply from all chunks of its completions."""
        ...

    def chunk(self, chunk: ParsedChunk, /) -> bytes:
        """Return the events of a chunk."""
        ...

    def error(self, error: ErrorReply, /) -> bytes:
        """Return the last event of a stream that failed."""
        ...

    def end(self) -> bytes:
        """Return the last events of a stream."""
        ...


def server_sent_event(data: Mapping[str, Any], *, kind: str = "") -> bytes:
    """Return an event of a stream."""
    name = f"event: {kind}\n" if kind else ""
    return name.encode() + b"data: " + to_json(data, inf_nan_mode="null") + b"\n\n"


def arguments_text(call: ToolCall) -> str:
    """Return the arguments of a call as JSON."""
    return json.dumps(call.arguments, ensure_ascii=False)


DONE = b"data: [DONE]\n\n"


class ChatWriter:
    """Writes a chat completion. Fields with `token_ids`, and `stop_reason`, are extensions of OpenAI's format."""

    def __init__(self, request: ChatCompletionRequest, template: ChatTemplate) -> None:
        self._request = request
        self._template = template
        self._started: set[int] = set()
        self._chunks: list[ParsedChunk] = []

    def whole(self, chunks: Sequence[ParsedChunk]) -> JsonObject:
        prompt_ids = chunks[0].head.prompt_ids.tolist() if self._request.return_token_ids else None
        return {
            **self._head(chunks[0], kind="chat.completion"),
            "choices": [self._choice(choice, message=_message(choice)) for choice in by_choice(chunks)],
            "usage": Usage.of(chunks).as_openai(),
            **without_none({"prompt_token_ids": prompt_ids}),
        }

    def chunk(self, chunk: ParsedChunk) -> bytes:
        self._chunks.append(chunk)
        is_first = chunk.index not in self._started
        has_tokens = bool(chunk.decoded.token_ids)
        is_seen = bool(chunk.delta.content or chunk.delta.reasoning or chunk.calls or chunk.finish_reason)
        shows_tokens = bool(self._request.return_token_ids or self._request.logprobs)
        if not is_first and not is_seen and not (shows_tokens and has_tokens):
            return b""
        body = {
            **self._head(self._chunks[0], kind="chat.completion.chunk"),
            "choices": [self._choice(chunk, delta=_delta(chunk, is_first=is_first))],
        }
        if self._request.return_token_ids and not self._started:
            body["prompt_token_ids"] = chunk.head.prompt_ids.tolist()
        self._started.add(chunk.index)
        return server_sent_event(body)

    def error(self, error: ErrorReply) -> bytes:
        return server_sent_event(error.as_openai())

    def end(self) -> bytes:
        options = self._request.stream_options
        if options is None or not options.include_usage:
            return DONE
        head = self._head(self._chunks[0], kind="chat.completion.chunk")
        return server_sent_event({**head, "choices": [], "usage": Usage.of(self._chunks).as_openai()}) + DONE

    def _head(self, chunk: ParsedChunk, *, kind: str) -> JsonObject:
        head = chunk.head
        return {
            "id": f"chatcmpl-{head.id}",
            "object": kind,
            "created": head.created,
            "model": self._request.model,
        }

    def _choice(self, chunk: ParsedChunk, **message: JsonObject) -> JsonObject:
        has_logprobs = bool(self._request.logprobs)
        more = {
            "logprobs": {"content": token_logprobs(chunk.decoded, self._template)} if has_logprobs else None,
            "token_ids": chunk.decoded.token_ids if self._request.return_token_ids else None,
            "stop_reason": chunk.decoded.stop_text,
        }
        return {"index": chunk.index, **message, "finish_reason": chunk.finish_reason, **without_none(more)}


def token_logprobs(decoded: DecodedChunk, template: ChatTemplate) -> list[JsonObject]:
    """Return the log-probs of a chunk's tokens in the form of the chat completions and the Responses API."""
    tops = decoded.top_logprobs or [()] * len(decoded.token_ids)
    return [
        {
            **_candidate(token_id, logprob, template),
            "top_logprobs": [_candidate(*candidate, template) for candidate in top],
        }
        for token_id, logprob, top in zip(decoded.token_ids, decoded.logprobs or (), tops, strict=True)
    ]


def _candidate(token_id: int, logprob: float, template: ChatTemplate) -> JsonObject:
    token = template.decode([token_id])
    encoded = token.encode()
    if "\ufffd" in token:  # the token is part of a character
        encoded = bytes_of_name(template.tokenizer.convert_ids_to_tokens(token_id))
    return {"token": token, "logprob": logprob, "bytes": list(encoded)}


def _message(choice: ParsedChunk) -> JsonObject:
    content = choice.delta.content
    more = {"reasoning_content": choice.delta.reasoning or None, "tool_calls": _calls(choice) or None}
    return {
        "role": "assistant",
        "content": content if content or not choice.calls else None,
        **without_none(more),
    }


def _delta(chunk: ParsedChunk, *, is_first: bool) -> JsonObject:
    calls = [{"index": position, **call} for position, call in enumerate(_calls(chunk))]
    return without_none(
        {
            "role": "assistant" if is_first else None,
            "content": chunk.delta.content or ("" if is_first else None),
            "reasoning_content": chunk.delta.reasoning or None,
            "tool_calls": calls or None,
        }
    )


def _calls(chunk: ParsedChunk) -> list[JsonObject]:
    return [
        {
            "id": call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": arguments_text(call)},
        }
        for call_id, call in chunk.calls.items()
    ]

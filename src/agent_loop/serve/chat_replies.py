"""Writers of replies, and those of chat and text completions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

from pydantic_core import to_json

from agent_loop.chat.byte_level import bytes_of_name
from agent_loop.chat.template import ChatTemplate
from agent_loop.serve.chat_requests import ChatCompletionRequest, CompletionRequest, SamplingRequest
from agent_loop.serve.completions import ReplyChunk, by_choice
from agent_loop.serve.errors import ErrorReply
from agent_loop.serve.fields import without_none
from agent_loop.types import ToolCall

JsonObject: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request. A prompt counts once, its completions are summed."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int | None = None
    """Tokens of the prompt that were in the server's prefix cache; None if the server does not say."""

    @classmethod
    def of(cls, chunks: Sequence[ReplyChunk]) -> Usage:
        """Return the token counts of a request from the chunks of all of its completions."""
        cached = [c.tokens.num_cached_tokens for c in chunks if c.tokens.num_cached_tokens is not None]
        return cls(
            prompt_tokens=len(chunks[0].head.prompt_ids),
            completion_tokens=sum(len(chunk.tokens.token_ids) for chunk in chunks),
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

    def whole(self, chunks: Sequence[ReplyChunk], /) -> Mapping[str, Any]:
        """Return the reply from all chunks of its completions."""
        ...

    def chunk(self, chunk: ReplyChunk, /) -> bytes:
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


class _OpenAIWriter:
    """Base class of the writers of chat and text completions.

    Fields with `token_ids`, and `stop_reason`, are extensions of OpenAI's format.
    """

    def __init__(
        self, request: SamplingRequest, template: ChatTemplate, *, kind: str, id_prefix: str
    ) -> None:
        self._base = request
        self._template = template
        self._kind = kind
        self._id_prefix = id_prefix
        self._chunks: list[ReplyChunk] = []

    def error(self, error: ErrorReply) -> bytes:
        return server_sent_event(error.as_openai())

    def end(self) -> bytes:
        options = self._base.stream_options
        if options is None or not options.include_usage:
            return DONE
        usage = self._usage(self._chunks).as_openai()
        return server_sent_event(self._body(self._chunks[0], choices=[], usage=usage)) + DONE

    def _usage(self, chunks: Sequence[ReplyChunk]) -> Usage:
        return Usage.of(chunks)

    def _body(self, chunk: ReplyChunk, *, kind: str = "", **fields: Any) -> JsonObject:
        return {
            "id": f"{self._id_prefix}-{chunk.head.id}",
            "object": kind or self._kind,
            "created": chunk.head.created,
            "model": self._base.model,
            **fields,
        }


class ChatWriter(_OpenAIWriter):
    """Writes a chat completion."""

    def __init__(self, request: ChatCompletionRequest, template: ChatTemplate) -> None:
        super().__init__(request, template, kind="chat.completion.chunk", id_prefix="chatcmpl")
        self._request = request
        self._started: set[int] = set()

    def whole(self, chunks: Sequence[ReplyChunk]) -> JsonObject:
        prompt_ids = chunks[0].head.prompt_ids.tolist() if self._request.return_token_ids else None
        return self._body(
            chunks[0],
            kind="chat.completion",
            choices=[self._choice(choice, message=_message(choice)) for choice in by_choice(chunks)],
            usage=Usage.of(chunks).as_openai(),
            **without_none({"prompt_token_ids": prompt_ids}),
        )

    def chunk(self, chunk: ReplyChunk) -> bytes:
        self._chunks.append(chunk)
        is_first = chunk.index not in self._started
        is_seen = bool(chunk.delta.content or chunk.delta.reasoning or chunk.calls or chunk.end)
        shows_tokens = bool(self._request.return_token_ids or self._request.logprobs)
        if not is_first and not is_seen and not (shows_tokens and chunk.tokens.token_ids):
            return b""
        body = self._body(
            self._chunks[0], choices=[self._choice(chunk, delta=_delta(chunk, is_first=is_first))]
        )
        if self._request.return_token_ids and not self._started:
            body["prompt_token_ids"] = chunk.head.prompt_ids.tolist()
        self._started.add(chunk.index)
        return server_sent_event(body)

    def _choice(self, chunk: ReplyChunk, **message: JsonObject) -> JsonObject:
        has_logprobs = bool(self._request.logprobs)
        more = {
            "logprobs": {"content": token_logprobs(chunk, self._template)} if has_logprobs else None,
            "token_ids": chunk.tokens.token_ids if self._request.return_token_ids else None,
            "stop_reason": chunk.stop_text,
        }
        return {"index": chunk.index, **message, "finish_reason": chunk.finish_reason, **without_none(more)}


class TextWriter(_OpenAIWriter):
    """Writes a text completion."""

    def __init__(self, request: CompletionRequest, template: ChatTemplate, *, num_prompt_tokens: int) -> None:
        super().__init__(request, template, kind="text_completion", id_prefix="cmpl")
        self._request = request
        self._num_prompt_tokens = num_prompt_tokens
        self._offsets: dict[int, int] = {}
        """Number of characters sent of each completion that has begun."""

    def whole(self, chunks: Sequence[ReplyChunk]) -> JsonObject:
        choices = [self._choice(choice) for choice in by_choice(chunks)]
        return self._body(chunks[0], choices=choices, usage=self._usage(chunks).as_openai())

    def chunk(self, chunk: ReplyChunk) -> bytes:
        self._chunks.append(chunk)
        shows_tokens = self._request.return_token_ids or self._request.wants_logprobs
        if not chunk.delta.content and chunk.end is None and not (shows_tokens and chunk.tokens.token_ids):
            return b""
        return server_sent_event(self._body(self._chunks[0], choices=[self._choice(chunk)]))

    def _usage(self, chunks: Sequence[ReplyChunk]) -> Usage:
        return replace(Usage.of(chunks), prompt_tokens=self._num_prompt_tokens)

    def _choice(self, chunk: ReplyChunk) -> JsonObject:
        shows_ids = bool(self._request.return_token_ids)
        is_first = chunk.index not in self._offsets
        offset = self._offsets.get(chunk.index, 0)
        self._offsets[chunk.index] = offset + len(chunk.delta.content)
        more = {
            "token_ids": chunk.tokens.token_ids if shows_ids else None,
            "prompt_token_ids": chunk.head.prompt_ids.tolist() if shows_ids and is_first else None,
        }
        return {
            "index": chunk.index,
            "text": chunk.delta.content,
            "finish_reason": chunk.end,
            "logprobs": self._logprobs(chunk, offset=offset) if self._request.wants_logprobs else None,
            **without_none(more),
        }

    def _logprobs(self, chunk: ReplyChunk, *, offset: int) -> JsonObject:
        tokens = [self._template.decode([token]) for token in chunk.tokens.token_ids]
        logprobs: JsonObject = {
            "tokens": tokens,
            "token_logprobs": list(chunk.tokens.logprobs or ()),
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=offset)) if tokens else [],
        }
        if self._request.num_top_logprobs:
            logprobs["top_logprobs"] = [
                {self._template.decode([token]): logprob for token, logprob in reversed(top)}
                for top in chunk.top_logprobs
            ]
        return logprobs


def token_logprobs(chunk: ReplyChunk, template: ChatTemplate) -> list[JsonObject]:
    """Return the log-probs of a chunk's tokens in the form of the chat completions and the Responses API."""
    token_ids = chunk.tokens.token_ids
    tops = chunk.top_logprobs or [()] * len(token_ids)
    return [
        {
            **_candidate(token_id, logprob, template),
            "top_logprobs": [_candidate(*candidate, template) for candidate in top],
        }
        for token_id, logprob, top in zip(token_ids, chunk.tokens.logprobs or (), tops, strict=True)
    ]


def _candidate(token_id: int, logprob: float, template: ChatTemplate) -> JsonObject:
    token = template.decode([token_id])
    encoded = token.encode()
    if "\ufffd" in token:  # the token is part of a character
        encoded = bytes_of_name(template.tokenizer.convert_ids_to_tokens(token_id))
    return {"token": token, "logprob": logprob, "bytes": list(encoded)}


def _message(choice: ReplyChunk) -> JsonObject:
    content = choice.delta.content
    more = {"reasoning_content": choice.delta.reasoning or None, "tool_calls": _calls(choice) or None}
    return {
        "role": "assistant",
        "content": content if content or not choice.calls else None,
        **without_none(more),
    }


def _delta(chunk: ReplyChunk, *, is_first: bool) -> JsonObject:
    calls = [{"index": position, **call} for position, call in enumerate(_calls(chunk))]
    return without_none(
        {
            "role": "assistant" if is_first else None,
            "content": chunk.delta.content or ("" if is_first else None),
            "reasoning_content": chunk.delta.reasoning or None,
            "tool_calls": calls or None,
        }
    )


def _calls(chunk: ReplyChunk) -> list[JsonObject]:
    return [
        {
            "id": call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": arguments_text(call)},
        }
        for call_id, call in chunk.calls.items()
    ]

"""Response models of the OpenAI API."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal, TypeAlias
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

from agent_loop.chat.byte_level import bytes_of_name
from agent_loop.chat.template import ChatTemplate
from agent_loop.runtime.concurrency import merged, run_together
from agent_loop.serve.chat_requests import ChatCompletionRequest
from agent_loop.serve.sampling import DecodedChunk
from agent_loop.serve.stream_parser import ParsedDelta
from agent_loop.types import IntArray, ToolCall

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


class ResponseModel(BaseModel):
    """Base class of response models. In JSON, optional fields without a value are left out, required ones are null."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    @model_serializer(mode="wrap")
    def _without_absent(self, write: SerializerFunctionWrapHandler):
        required = type(self).model_fields
        return {
            name: value
            for name, value in write(self).items()
            if value is not None or required[name].is_required()
        }


class PromptTokensDetails(ResponseModel):
    """Details of `Usage.prompt_tokens`."""

    cached_tokens: int
    """Tokens found in the server's prefix cache."""


class Usage(ResponseModel):
    """Token counts of a request. The prompt counts once, the completions are summed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class ToolCallFunction(ResponseModel):
    """Function of a tool call."""

    name: str
    arguments: str
    """Arguments as a JSON object."""


class ResponseToolCall(ResponseModel):
    """Tool call of an assistant message."""

    id: str
    type: Literal["function"] = "function"
    function: ToolCallFunction


class ToolCallDelta(ResponseToolCall):
    """Tool call in a stream. Each call is sent whole."""

    index: int


class TopLogProb(ResponseModel):
    """Candidate token with its log-prob."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogProb(ResponseModel):
    """Sampled token with its log-prob."""

    token: str
    logprob: float
    """`log_softmax(logits / temperature)`, before top-k and top-p."""
    bytes: list[int]
    """Bytes of the token in UTF-8; those of several tokens together may be a character."""
    top_logprobs: list[TopLogProb] = []
    """The likeliest tokens, as many as `top_logprobs` of the request. The sampled token need not be among them."""


class ChoiceLogProbs(ResponseModel):
    """Log-probs of the tokens of a chat completion."""

    content: list[TokenLogProb] | None
    refusal: None = None


class AssistantMessage(ResponseModel):
    """Assistant message of a chat completion."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ResponseToolCall] | None = None


class ChatChoice(ResponseModel):
    """One of the `n` completions of a request."""

    index: int
    message: AssistantMessage
    finish_reason: FinishReason
    logprobs: ChoiceLogProbs | None = None
    token_ids: list[int] | None = None
    """Sampled token ids, including the end token."""
    stop_reason: str | None = None
    """Text of `stop` that ended the completion."""


class ChatCompletion(ResponseModel):
    """Response of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class DeltaMessage(ResponseModel):
    """Fields of a message that a streamed chunk adds."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(ResponseModel):
    """Part of a streamed chunk that belongs to one completion."""

    index: int
    delta: DeltaMessage
    finish_reason: FinishReason | None
    logprobs: ChoiceLogProbs | None = None
    token_ids: list[int] | None = None
    stop_reason: str | None = None


class ChatCompletionChunk(ResponseModel):
    """Chunk of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    """Set in the last chunk if `stream_options.include_usage` is set."""
    prompt_token_ids: list[int] | None = None
    """Set in the first chunk if `return_token_ids` is set."""


class TextCompletionLogProbs(ResponseModel):
    """Log-probs of the tokens of a text completion, as parallel lists."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None = None
    """Log-probs of the likeliest tokens by their text, for each token."""
    text_offset: list[int]
    """Offset of each token in the text, in characters."""


class TextCompletionChoice(ResponseModel):
    """One text completion, or the part of it in a streamed chunk."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None
    logprobs: TextCompletionLogProbs | None
    token_ids: list[int] | None = None
    """Sampled token ids, including the end token."""
    prompt_token_ids: list[int] | None = None


class TextCompletion(ResponseModel):
    """Response of `/v1/completions`, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextCompletionChoice]
    usage: Usage | None = None


class ErrorDetail(ResponseModel):
    """Error message with its type."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseModel):
    """Response to a request that failed."""

    error: ErrorDetail


class ModelCard(ResponseModel):
    """Description of a model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int | None = None


class ModelList(ResponseModel):
    """Response of `/v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def usage_of(chunks: Sequence[DecodedChunk], *, prompt_tokens: int) -> Usage:
    """Return the token counts of a request, from the chunks of all of its completions."""
    completion_tokens = sum(len(chunk.token_ids) for chunk in chunks)
    cached = [chunk.num_cached_tokens for chunk in chunks if chunk.num_cached_tokens is not None]
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=max(cached)) if cached else None,
    )


@dataclass(frozen=True, slots=True)
class ParsedChunk:
    """Chunk of one of a request's completions, decoded and parsed."""

    index: int
    """Index of the completion."""
    decoded: DecodedChunk
    delta: ParsedDelta
    calls: Mapping[str, ToolCall]
    """The delta's calls by their ids."""


@dataclass(frozen=True, slots=True)
class ResponseBuilder:
    """Builds the response to one request."""

    request: ChatCompletionRequest
    template: ChatTemplate
    prompt_ids: IntArray
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def shown_prompt_ids(self) -> list[int] | None:
        """Prompt token ids; None unless the request asks for token ids."""
        return self.prompt_ids.tolist() if self.request.return_token_ids else None

    def completion(self, choices: Sequence[Sequence[ParsedChunk]]) -> ChatCompletion:
        """Build the whole response from the chunks of its completions."""
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.request.model,
            choices=[self._choice(index, chunks) for index, chunks in enumerate(choices)],
            usage=self._usage([chunk for chunks in choices for chunk in chunks]),
            prompt_token_ids=self.shown_prompt_ids,
        )

    def _choice(self, index: int, chunks: Sequence[ParsedChunk]) -> ChatChoice:
        parsed = ParsedDelta.joined([chunk.delta for chunk in chunks])
        calls = [
            ResponseToolCall(id=call_id, function=_function(call))
            for chunk in chunks
            for call_id, call in chunk.calls.items()
        ]
        logprobs = [p for chunk in chunks for p in self._logprobs(chunk.decoded)]
        last = chunks[-1].decoded
        return ChatChoice(
            index=index,
            message=AssistantMessage(
                content=parsed.content if parsed.content or not calls else None,
                reasoning_content=parsed.reasoning or None,
                tool_calls=calls or None,
            ),
            finish_reason=_finish_reason(last, has_calls=bool(calls)) or "stop",
            logprobs=ChoiceLogProbs(content=logprobs) if self.request.logprobs else None,
            token_ids=[token for chunk in chunks for token in chunk.decoded.token_ids]
            if self.request.return_token_ids
            else None,
            stop_reason=last.stop_text,
        )

    def chunk_choice(self, chunk: ParsedChunk, *, is_first: bool) -> ChunkChoice | None:
        """Build the choice of a streamed chunk; None if the chunk adds nothing that the client sees."""
        decoded, parsed = chunk.decoded, chunk.delta
        calls = [
            ToolCallDelta(index=position, id=call_id, function=_function(call))
            for position, (call_id, call) in enumerate(chunk.calls.items())
        ]
        finish_reason = _finish_reason(decoded, has_calls=bool(calls))
        shows_tokens = bool(self.request.return_token_ids or self.request.logprobs)
        is_empty = not (parsed.content or parsed.reasoning or calls or finish_reason)
        if is_empty and not is_first and not (shows_tokens and decoded.token_ids):
            return None
        return ChunkChoice(
            index=chunk.index,
            delta=DeltaMessage(
                role="assistant" if is_first else None,
                content=parsed.content or ("" if is_first else None),
                reasoning_content=parsed.reasoning or None,
                tool_calls=calls or None,
            ),
            finish_reason=finish_reason,
            logprobs=ChoiceLogProbs(content=self._logprobs(decoded)) if self.request.logprobs else None,
            token_ids=decoded.token_ids if self.request.return_token_ids else None,
            stop_reason=decoded.stop_text,
        )

    def chunk(
        self, choices: list[ChunkChoice], *, prompt_token_ids: list[int] | None = None
    ) -> ChatCompletionChunk:
        """Build a chunk of the stream from its choices."""
        return ChatCompletionChunk(
            id=self.id,
            created=self.created,
            model=self.request.model,
            choices=choices,
            prompt_token_ids=prompt_token_ids,
        )

    def usage_chunk(self, chunks: Sequence[ParsedChunk]) -> ChatCompletionChunk | None:
        """Build the last chunk, which holds the usage; None if the request does not ask for it."""
        options = self.request.stream_options
        if options is None or not options.include_usage:
            return None
        return self.chunk([]).model_copy(update={"usage": self._usage(chunks)})

    def _usage(self, chunks: Sequence[ParsedChunk]) -> Usage:
        return usage_of([chunk.decoded for chunk in chunks], prompt_tokens=len(self.prompt_ids))

    def _logprobs(self, decoded: DecodedChunk) -> list[TokenLogProb]:
        """Return the log-probs of the chunk's tokens; none unless the request asks for them."""
        if not self.request.logprobs:
            return []
        tops = decoded.top_logprobs or [()] * len(decoded.token_ids)
        return [
            TokenLogProb(
                **self._candidate(token_id, logprob).model_dump(),
                top_logprobs=[self._candidate(*candidate) for candidate in top],
            )
            for token_id, logprob, top in zip(decoded.token_ids, decoded.logprobs or (), tops, strict=True)
        ]

    def _candidate(self, token_id: int, logprob: float) -> TopLogProb:
        token = self.template.decode([token_id])
        encoded = token.encode()
        if "\ufffd" in token:  # the token is part of a character
            encoded = bytes_of_name(self.template.tokenizer.convert_ids_to_tokens(token_id))
        return TopLogProb(token=token, logprob=logprob, bytes=list(encoded))


def _function(call: ToolCall) -> ToolCallFunction:
    return ToolCallFunction(name=call.name, arguments=json.dumps(call.arguments, ensure_ascii=False))


def _finish_reason(chunk: DecodedChunk, *, has_calls: bool) -> FinishReason | None:
    if chunk.finish_reason is None:
        return None
    if chunk.finish_reason == "length":
        return "length"
    return "tool_calls" if has_calls else "stop"


async def whole_reply(
    choices: Sequence[AsyncGenerator[ParsedChunk]], *, make_builder: Callable[[], ResponseBuilder]
) -> ChatCompletion:
    """Wait for all completions of a request and return the response.

    Args:
        choices: The chunks of each completion.
        make_builder: Returns the builder of the response. Called when the first chunk has arrived, or at the end.
    """

    async def all_of(chunks: AsyncGenerator[ParsedChunk]) -> list[ParsedChunk]:
        async with aclosing(chunks):
            return [chunk async for chunk in chunks]

    followed = await run_together(all_of(chunks) for chunks in choices)
    return make_builder().completion(followed)


async def streamed_reply(
    choices: Sequence[AsyncGenerator[ParsedChunk]], *, make_builder: Callable[[], ResponseBuilder]
) -> AsyncGenerator[ChatCompletionChunk]:
    """Yield the response in chunks while it is sampled. The arguments are those of `whole_reply`."""
    chunks: list[ParsedChunk] = []
    started: set[int] = set()
    builder: ResponseBuilder | None = None
    async with aclosing(merged(choices)) as followed:
        async for chunk in followed:
            builder = builder or make_builder()
            chunks.append(chunk)
            choice = builder.chunk_choice(chunk, is_first=chunk.index not in started)
            if choice is not None:
                yield builder.chunk([choice], prompt_token_ids=None if started else builder.shown_prompt_ids)
                started.add(chunk.index)
    if (last := (builder or make_builder()).usage_chunk(chunks)) is not None:
        yield last

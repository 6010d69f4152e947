"""Response models of the OpenAI API."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

from agent_loop.chat.byte_level import bytes_of_name
from agent_loop.chat.template import ChatTemplate
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


def usage_of(*, prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> Usage:
    """Return the token counts of a request."""
    details = None if cached_tokens is None else PromptTokensDetails(cached_tokens=cached_tokens)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=details,
    )


class UsageCounter:
    """Counts the tokens of a request over all of its completions."""

    def __init__(self, *, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0
        self._cached_tokens: int | None = None

    def add(self, chunk: DecodedChunk) -> None:
        self._completion_tokens += len(chunk.token_ids)
        if chunk.num_cached_tokens is not None:
            self._cached_tokens = max(self._cached_tokens or 0, chunk.num_cached_tokens)

    @property
    def usage(self) -> Usage:
        return usage_of(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            cached_tokens=self._cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class ParsedChunk:
    """Chunk of one of a request's completions, decoded and parsed."""

    index: int
    """Index of the completion."""
    decoded: DecodedChunk
    delta: ParsedDelta


def random_call_id(_: int) -> str:
    """Return a random call id."""
    return f"call_{uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class ResponseBuilder:
    """Builds the response to one request."""

    request: ChatCompletionRequest
    template: ChatTemplate
    prompt_ids: IntArray
    new_call_id: Callable[[int], str] = random_call_id
    """Returns the id of the n-th call of a completion. Used if the model's format has no call ids."""
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def shown_prompt_ids(self) -> list[int] | None:
        """Prompt token ids; None unless the request asks for token ids."""
        return self.prompt_ids.tolist() if self.request.return_token_ids else None

    def usage_counter(self) -> UsageCounter:
        """Return a new counter of the request's tokens."""
        return UsageCounter(prompt_tokens=len(self.prompt_ids))

    def completion(self, choices: list[ChatChoice], *, usage: UsageCounter) -> ChatCompletion:
        """Build the whole response from its choices."""
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.request.model,
            choices=choices,
            usage=usage.usage,
            prompt_token_ids=self.shown_prompt_ids,
        )

    def choice(self, index: int, chunks: Sequence[ParsedChunk]) -> ChatChoice:
        """Build a whole choice from the chunks of its completion."""
        parsed = ParsedDelta.joined([chunk.delta for chunk in chunks])
        token_ids = [token for chunk in chunks for token in chunk.decoded.token_ids]
        logprobs = [p for chunk in chunks for p in self._logprobs(chunk.decoded)]
        calls = [ResponseToolCall(id=i, function=f) for i, f in self._with_ids(parsed.tool_calls)]
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
            token_ids=token_ids if self.request.return_token_ids else None,
            stop_reason=last.stop_text,
        )

    def chunk_choice(self, chunk: ParsedChunk, *, is_first: bool) -> ChunkChoice | None:
        """Build the choice of a streamed chunk; None if the chunk adds nothing that the client sees."""
        decoded, parsed = chunk.decoded, chunk.delta
        calls = [
            ToolCallDelta(index=position, id=call_id, function=function)
            for position, (call_id, function) in enumerate(self._with_ids(parsed.tool_calls))
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

    def usage_chunk(self, usage: UsageCounter) -> ChatCompletionChunk | None:
        """Build the last chunk, which holds the usage; None if the request does not ask for it."""
        options = self.request.stream_options
        if options is None or not options.include_usage:
            return None
        return self.chunk([]).model_copy(update={"usage": usage.usage})

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

    def _with_ids(self, calls: Sequence[ToolCall]) -> list[tuple[str, ToolCallFunction]]:
        """Return each call with a unique id, which is the model's own id if there is one."""
        written: dict[str, ToolCallFunction] = {}
        for position, call in enumerate(calls):
            call_id = call.id if call.id and call.id not in written else self.new_call_id(position)
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            written[call_id] = ToolCallFunction(name=call.name, arguments=arguments)
        return list(written.items())


def _finish_reason(chunk: DecodedChunk, *, has_calls: bool) -> FinishReason | None:
    if chunk.finish_reason is None:
        return None
    if chunk.finish_reason == "length":
        return "length"
    return "tool_calls" if has_calls else "stop"

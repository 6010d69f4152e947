"""What clients are answered, in the shapes of the OpenAI API."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


class ResponseModel(BaseModel):
    """Part of an answer. On the wire an optional field without a value is left out, a required one is null."""

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
    """Of `Usage.prompt_tokens`."""

    cached_tokens: int
    """Found in the engine's cache."""


class Usage(ResponseModel):
    """Token counts: the prompt once, the completions together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class ToolCallFunction(ResponseModel):
    """What is called."""

    name: str
    arguments: str
    """A JSON object."""


class ResponseToolCall(ResponseModel):
    """A call that the model wrote."""

    id: str
    type: Literal["function"] = "function"
    function: ToolCallFunction


class ToolCallDelta(ResponseToolCall):
    """A call in a stream; it comes whole."""

    index: int


class TopLogProb(ResponseModel):
    """Another candidate; none are given."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogProb(ResponseModel):
    """A sampled token."""

    token: str
    logprob: float
    """`log_softmax(logits / temperature)`, before top-k and top-p."""
    bytes: list[int] | None
    """None where the token is a part of a character."""
    top_logprobs: list[TopLogProb] = []


class ChoiceLogProbs(ResponseModel):
    """Of a chat completion's tokens."""

    content: list[TokenLogProb] | None
    refusal: None = None


class AssistantMessage(ResponseModel):
    """What the model said."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ResponseToolCall] | None = None


class ChatChoice(ResponseModel):
    """One of the `n` completions."""

    index: int
    message: AssistantMessage
    finish_reason: FinishReason
    logprobs: ChoiceLogProbs | None = None
    token_ids: list[int] | None = None
    """As sampled, the end token included."""
    stop_reason: str | None = None
    """The text of `stop` before which it ended."""


class ChatCompletion(ResponseModel):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class DeltaMessage(ResponseModel):
    """What a part of a stream adds."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(ResponseModel):
    """One completion's share of a chunk."""

    index: int
    delta: DeltaMessage
    finish_reason: FinishReason | None
    logprobs: ChoiceLogProbs | None = None
    token_ids: list[int] | None = None
    stop_reason: str | None = None


class ChatCompletionChunk(ResponseModel):
    """A part of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    """In the last chunk, if it was asked for."""
    prompt_token_ids: list[int] | None = None
    """In the first chunk, if they were asked for."""


class TextCompletionLogProbs(ResponseModel):
    """Of a text completion's tokens, as parallel lists."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: None = None
    text_offset: list[int]
    """Where each token begins in the text, in characters."""


class TextCompletionChoice(ResponseModel):
    """One completion, or what a part of a stream adds to it."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None
    logprobs: TextCompletionLogProbs | None
    token_ids: list[int] | None = None
    """As sampled, the end token included."""
    prompt_token_ids: list[int] | None = None


class TextCompletion(ResponseModel):
    """The answer of `/v1/completions`, and each part of a stream of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextCompletionChoice]
    usage: Usage | None = None


class ErrorDetail(ResponseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseModel):
    """The answer to a request that failed."""

    error: ErrorDetail


class ModelCard(ResponseModel):
    """What is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int | None = None


class ModelList(ResponseModel):
    """The answer of `/v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def usage_of(*, prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> Usage:
    """The counts of one request."""
    details = None if cached_tokens is None else PromptTokensDetails(cached_tokens=cached_tokens)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=details,
    )

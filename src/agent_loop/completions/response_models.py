"""Response models of the OpenAI API."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

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

"""Translates chat completions to messages of the Messages API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

from agent_loop.completions.anthropic.requests import PromptRequest
from agent_loop.completions.anthropic.response_models import (
    AppliedEdits,
    MessageResponse,
    MessageUsage,
    ModelInfo,
    ModelInfoList,
    ResponseBlock,
    StopReasonName,
    TokenCount,
)
from agent_loop.completions.response_models import (
    AssistantMessage,
    ChatCompletion,
    FinishReason,
    ModelCard,
    Usage,
)

_STOP_REASONS: Mapping[FinishReason, StopReasonName] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


def to_message(completion: ChatCompletion, *, request: PromptRequest) -> MessageResponse:
    """Return a chat completion as a message.

    Args:
        completion: The completion.
        request: The request, which says whether the message shows thinking.
    """
    [choice] = completion.choices
    return MessageResponse(
        id=message_id(completion.id),
        model=completion.model,
        content=list(_blocks(choice.message, request=request)),
        stop_reason=stop_reason_of(choice.finish_reason, stop_text=choice.stop_reason),
        stop_sequence=choice.stop_reason,
        usage=usage_of(completion.usage),
        context_management=edits_of(request),
    )


def message_id(completion_id: str) -> str:
    """Return the id of the message for a chat completion."""
    return completion_id.replace("chatcmpl-", "msg_")


def stop_reason_of(finish_reason: FinishReason, *, stop_text: str | None) -> StopReasonName:
    """Return the Messages API's name of a finish reason."""
    return "stop_sequence" if stop_text is not None else _STOP_REASONS[finish_reason]


def usage_of(usage: Usage | None) -> MessageUsage:
    """Return the token counts of a request. Cached prompt tokens are counted separately."""
    if usage is None:
        return MessageUsage(input_tokens=0, output_tokens=0)
    cached = 0 if usage.prompt_tokens_details is None else usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=cached,
        cache_creation_input_tokens=0,
    )


def edits_of(request: PromptRequest) -> AppliedEdits | None:
    """Return the report of applied edits; None if the request asks for no edits."""
    return None if request.context_management is None else AppliedEdits(applied_edits=[])


def to_token_count(num_tokens: int, *, request: PromptRequest) -> TokenCount:
    """Return a number of prompt tokens as a response."""
    edits = None if request.context_management is None else {"original_input_tokens": num_tokens}
    return TokenCount(input_tokens=num_tokens, context_management=edits)


def to_model_info(card: ModelCard) -> ModelInfo:
    """Return the description of a model."""
    created = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
    return ModelInfo(
        id=card.id, display_name=card.id, created_at=created, max_input_tokens=card.max_model_len
    )


def to_model_list(card: ModelCard) -> ModelInfoList:
    """Return a list with one model."""
    return ModelInfoList(data=[to_model_info(card)], first_id=card.id, last_id=card.id)


def _blocks(message: AssistantMessage, *, request: PromptRequest) -> Iterator[ResponseBlock]:
    if request.shows_thinking and message.reasoning_content:
        thinking = message.reasoning_content if request.shows_thoughts else ""
        yield ResponseBlock(type="thinking", thinking=thinking, signature="")
    if message.content:
        yield ResponseBlock(type="text", text=message.content)
    for call in message.tool_calls or ():
        arguments = json.loads(call.function.arguments)
        yield ResponseBlock(type="tool_use", id=call.id, name=call.function.name, input=arguments)

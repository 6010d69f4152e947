"""What clients of the Messages API are answered."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from agent_loop.completions.response_models import ResponseModel

StopReasonName: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class ContentBlock(ResponseModel):
    """A part of what the model said; the fields are those of its type."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class MessageUsage(ResponseModel):
    """Token counts."""

    input_tokens: int
    """Those of the prompt that were computed."""
    output_tokens: int
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class MessageResponse(ResponseModel):
    """The answer of `/v1/messages`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReasonName | None
    stop_sequence: str | None
    usage: MessageUsage

"""Response models of the Messages API."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from agent_loop.completions.response_models import ResponseModel

StopReasonName: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class ContentBlock(ResponseModel):
    """Content block of a message. Which fields are set depends on the type."""

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
    """Prompt tokens that were not found in the prefix cache."""
    output_tokens: int
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class MessageResponse(ResponseModel):
    """Response of `/v1/messages`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReasonName | None
    stop_sequence: str | None
    usage: MessageUsage

"""Response models of the Messages API."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from agent_loop.completions.response_models import ResponseModel

StopReasonName: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class ResponseBlock(ResponseModel):
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
    service_tier: Literal["standard"] = "standard"


class AppliedEdits(ResponseModel):
    """Edits of the conversation by the server. There are never any."""

    applied_edits: list[dict[str, Any]]


class MessageResponse(ResponseModel):
    """Response of `/v1/messages`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ResponseBlock]
    stop_reason: StopReasonName | None
    stop_sequence: str | None
    usage: MessageUsage
    context_management: AppliedEdits | None = None
    """Set if the request asks for edits."""


class TokenCount(ResponseModel):
    """Response of `/v1/messages/count_tokens`."""

    input_tokens: int
    context_management: dict[str, int] | None = None
    """Number of tokens before edits, if the request asks for edits."""


class ModelInfo(ResponseModel):
    """Description of a model."""

    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    """Time in the format of RFC 3339."""
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None = None


class ModelInfoList(ResponseModel):
    """Response of `/v1/models`."""

    data: list[ModelInfo]
    has_more: bool = False
    first_id: str | None
    last_id: str | None


class ThreadRefusal(ResponseModel):
    """Refusal of a `thread`, a stored conversation. Clients then send whole conversations."""

    error_code: Literal["thread_unsupported_request"] = "thread_unsupported_request"
    unsupported: tuple[str, ...] = ("thread",)


class MessagesErrorDetail(ResponseModel):
    """Error message with its type."""

    type: str
    message: str
    code: str | None = None
    """Extension: the code that the OpenAI API would give."""
    details: ThreadRefusal | None = None
    """Given if the request has a `thread`."""


class MessagesErrorResponse(ResponseModel):
    """Response to a request that failed."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str | None = None

"""Response models of the Responses API."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import Field

from agent_loop.completions.response_models import ResponseModel, TokenLogProb

ResponseStatus: TypeAlias = Literal["completed", "incomplete", "failed", "in_progress", "cancelled"]
ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputText(ResponseModel):
    """Text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field(default_factory=list[Any])
    logprobs: list[TokenLogProb] | None = None
    """One entry for each sampled token of the completion, with its reasoning and control tokens."""


class OutputMessage(ResponseModel):
    """Message of the model."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class SummaryText(ResponseModel):
    """Reasoning, if the request asks for a summary. It is not shortened."""

    type: Literal["summary_text"] = "summary_text"
    text: str


class ReasoningText(ResponseModel):
    """Reasoning, if the request does not ask for a summary."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class ReasoningItem(ResponseModel):
    """Reasoning of the model."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus
    summary: list[SummaryText]
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class FunctionCall(ResponseModel):
    """Call of a function."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    """Arguments as a JSON object."""


class CustomToolCall(ResponseModel):
    """Call of a custom tool."""

    id: str
    type: Literal["custom_tool_call"] = "custom_tool_call"
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    input: str


OutputItem: TypeAlias = ReasoningItem | OutputMessage | FunctionCall | CustomToolCall


class InputTokensDetails(ResponseModel):
    """Details of `ResponseUsage.input_tokens`."""

    cached_tokens: int
    """Tokens found in the server's prefix cache."""
    cache_write_tokens: int = 0


class OutputTokensDetails(ResponseModel):
    """Details of `ResponseUsage.output_tokens`."""

    reasoning_tokens: int = 0
    """Always 0: tokens of reasoning are part of `output_tokens`, and not counted separately."""


class ResponseUsage(ResponseModel):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(ResponseModel):
    """Reason why a response failed."""

    code: str
    message: str


class IncompleteDetails(ResponseModel):
    """Reason why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseObject(ResponseModel):
    """Response of `/v1/responses`."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    instructions: str | None
    previous_response_id: str | None
    metadata: dict[str, str]
    background: bool
    store: bool
    parallel_tool_calls: bool
    tool_choice: Any
    tools: list[dict[str, Any]]
    text: dict[str, Any]
    reasoning: dict[str, Any]
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"


class DeletedResponse(ResponseModel):
    """Response to the deletion of a stored response."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputItemList(ResponseModel):
    """Input items of a stored response."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool

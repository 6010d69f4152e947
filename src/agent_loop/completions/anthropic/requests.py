"""Request models of the Messages API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from agent_loop.completions.fields import MAX_STOPS, FiniteFloat, Ignored, Only, RequestModel, StopText


class InputMessage(RequestModel):
    """Message of the conversation."""

    role: Literal["user", "assistant"]
    content: str | list[dict[str, Any]]
    """Text, or blocks: `text`, `image` (base64), `tool_use`, `tool_result`, `thinking`."""


class ToolDefinition(RequestModel):
    """Tool that the client executes."""

    name: Annotated[str, Field(pattern=r"^\S+$", max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any]
    type: Annotated[Any, Only("custom")] = None
    cache_control: Ignored = None
    strict: bool | None = None


class ToolChoice(RequestModel):
    """Whether the model may call tools."""

    type: Annotated[str, Only("auto", "none")]
    """Forced calls are not supported."""
    disable_parallel_tool_use: Annotated[Any, Only(False)] = None


class MessagesRequest(RequestModel):
    """Body of `/v1/messages`."""

    model: str
    messages: Annotated[list[InputMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    stream: bool | None = None
    thinking: dict[str, Any] | None = None
    """Responses include reasoning unless `type` is `disabled`. A thinking budget has no effect."""
    metadata: Ignored = None
    service_tier: Ignored = None
    cache_control: Ignored = None
    inference_geo: Ignored = None
    container: Annotated[Any, Only()] = None
    mcp_servers: Annotated[Any, Only([])] = None
    context_management: Annotated[Any, Only()] = None
    output_config: Annotated[Any, Only()] = None
    output_format: Annotated[Any, Only()] = None

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.get("type") != "disabled"

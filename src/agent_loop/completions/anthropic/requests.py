"""Request models of the Messages API."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from agent_loop.completions.fields import (
    MAX_STOPS,
    UNSUPPORTED,
    FiniteFloat,
    Ignored,
    Only,
    RequestModel,
    StopText,
)
from agent_loop.runtime.describe import one_line


class InputMessage(RequestModel):
    """Message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]
    """Text, or blocks. See `blocks`."""


class ToolDefinition(RequestModel):
    """Tool that the client executes."""

    name: Annotated[str, Field(pattern=r"^\S+$", max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any]
    type: Annotated[Any, Only("custom")] = None
    strict: bool | None = None
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None
    allowed_callers: Annotated[Any, Only(["direct"], [])] = None
    defer_loading: Annotated[Any, Only(False)] = None
    input_examples: Annotated[Any, Only([])] = None

    @model_validator(mode="before")
    @classmethod
    def _is_run_by_the_client(cls, tool: Any) -> Any:
        kind: Any = cast(dict[str, Any], tool).get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            shown = one_line(kind, max_length=80)
            message = (
                f"tools of type {shown!r} are not supported, because Anthropic defines or runs them; leave the tool "
                "out, or define it with a name and an input_schema"
            )
            raise PydanticCustomError(UNSUPPORTED, "{message}", {"message": message, "wish": f"tools.{kind}"})
        return cast(Any, tool)


class ToolChoice(RequestModel):
    """Whether the model may, must or must not call tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Tool that must be called, with type `tool`."""
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_a_tool(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("type tool needs a name, and the other types have none")
        return self


class Thinking(RequestModel):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    """Has no effect."""
    display: Literal["summarized", "omitted"] | None = None
    """`omitted` leaves the text of thinking blocks empty."""


class OutputFormat(RequestModel):
    """JSON schema that the completion must match."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(RequestModel):
    """Options of the completion."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Passed to the chat template if the template knows `reasoning_effort`."""
    format: OutputFormat | None = None
    task_budget: Annotated[Any, Only()] = None


class ContextEdit(RequestModel):
    """Change that Anthropic's servers make to a conversation that gets long."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(max_length=128)]
    keep: Any = None

    @property
    def has_effect(self) -> bool:
        """Whether the edit could change the prompt."""
        return not (self.type.startswith("clear_thinking") and self.keep == "all")


class ContextManagement(RequestModel):
    """Edits of the conversation. None is applied: the model sees the conversation as the client sent it."""

    edits: list[ContextEdit] | None = None


class PromptRequest(RequestModel):
    """Fields that both a message and a count of its tokens have."""

    model: str
    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Older name of `output_config.format`."""
    context_management: ContextManagement | None = None
    cache_control: Ignored = None
    billing_policy: Ignored = None
    speed: Ignored = None
    mcp_servers: Annotated[Any, Only([])] = None
    compaction: Annotated[Any, Only()] = None

    @property
    def shows_thinking(self) -> bool:
        """Whether responses have thinking blocks."""
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def shows_thoughts(self) -> bool:
        """Whether thinking blocks have text."""
        return self.thinking is not None and self.thinking.display != "omitted"

    @property
    def unapplied_edits(self) -> list[str]:
        """Types of the edits that could change the prompt, which are not applied."""
        edits = [] if self.context_management is None else self.context_management.edits or []
        return [edit.type for edit in edits if edit.has_effect]


class CountTokensRequest(PromptRequest):
    """Body of `/v1/messages/count_tokens`."""


def _refuse_thread(thread: Any) -> Any:
    # No wish, because a client that believes in its thread leaves out the earlier messages.
    if thread is not None:
        raise ValueError("conversations are not stored; send the whole conversation, without thread")
    return thread


class MessagesRequest(PromptRequest):
    """Body of `/v1/messages`."""

    names_here = {  # noqa: RUF012  (pydantic's ClassVar of the base class)
        "input": "messages",
        "instructions": "system",
        "max_completion_tokens": "max_tokens",
        "max_output_tokens": "max_tokens",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format",
        "stop": "stop_sequences",
    }

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    stream: bool | None = None
    metadata: Ignored = None
    service_tier: Ignored = None
    inference_geo: Ignored = None
    diagnostics: Ignored = None
    fallback_credit_token: Ignored = None
    fallbacks: Annotated[Any, Only([], "default")] = None
    container: Annotated[Any, Only()] = None
    thread: Annotated[Any, AfterValidator(_refuse_thread), WithJsonSchema({"enum": [None]})] = None
    """Conversations are not stored. Clients that try it learn so from the error, and send whole conversations."""

"""Requests of the Messages API, translated to chat requests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import RequestError
from agent_loop.runtime.describe import one_line
from agent_loop.serve.chat_requests import ChatCompletionRequest
from agent_loop.serve.fields import (
    MAX_STOPS,
    FiniteFloat,
    RequestModel,
    StopText,
    ToolName,
    only,
    unsupported,
    without_none,
)

# -- messages ----------------------------------------------------------------------------------------------------------

Part: TypeAlias = dict[str, Any]
"""Content part of a chat message."""


def _text(text: str) -> Part:
    return {"type": "text", "text": text}


class Block(RequestModel):
    ignored = ("cache_control", "citations", "signature")


class TextBlock(Block):
    type: Literal["text"]
    text: str

    def parts(self) -> list[Part]:
        return [_text(self.text)]


class ImageSource(RequestModel):
    """Image in the request. URLs and uploaded files are not supported."""

    type: Annotated[str, only("base64")]
    media_type: str
    data: str


class ImageBlock(Block):
    type: Literal["image"]
    source: ImageSource

    def parts(self) -> list[Part]:
        url = f"data:{self.source.media_type};base64,{self.source.data}"
        return [{"type": "image_url", "image_url": {"url": url}}]


class DocumentSource(RequestModel):
    """Text of a document. PDF files, URLs and uploaded files are not supported."""

    type: Annotated[str, only("text", "content")]
    media_type: Annotated[Any, only("text/plain")] = None
    data: str | None = None
    content: str | list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]] | None = None


class DocumentBlock(Block):
    """Document, which becomes text with a heading."""

    type: Literal["document"]
    source: DocumentSource
    title: str | None = None
    context: str | None = None
    citations: Annotated[Any, only({"enabled": False})] = None

    def parts(self) -> list[Part]:
        opening = "\n".join(filter(None, ["<document>", self.title, self.context]))
        content = self.source.data if self.source.content is None else self.source.content
        return [_text(opening), *_parts(content or ""), _text("</document>")]


class SearchResultBlock(Block):
    """Search result, which becomes text with its title and its source as a heading."""

    type: Literal["search_result"]
    title: str
    source: str
    content: list[TextBlock]
    citations: Annotated[Any, only({"enabled": False})] = None

    def parts(self) -> list[Part]:
        opening = f"<search_result>\n{self.title}\n{self.source}"
        return [_text(opening), *_parts(self.content), _text("</search_result>")]


ContentBlock: TypeAlias = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[ContentBlock, Field(discriminator="type")]] | None = None
    is_error: bool | None = None

    def message(self) -> dict[str, Any]:
        """Return the chat message of the tool. The text of a failed call begins with `Error: `."""
        parts = _parts(self.content or "")
        if self.is_error and parts and parts[0]["type"] == "text":
            parts[0] = _text(f"Error: {parts[0]['text']}")
        elif self.is_error:
            parts.insert(0, _text("Error:"))
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": parts}


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Annotated[Any, only({"type": "direct"})] = None

    def call(self) -> dict[str, Any]:
        """Return the tool call of a chat message."""
        function = {"name": self.name, "arguments": json.dumps(self.input)}
        return {"type": "function", "id": self.id, "function": function}


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Block):
    """Encrypted reasoning of another model, which is left out."""

    ignored = ("cache_control", "data")

    type: Literal["redacted_thinking"]


UserBlock: TypeAlias = ContentBlock | ToolResultBlock
AssistantBlock: TypeAlias = TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock


def _parts(content: str | Sequence[ContentBlock]) -> list[Part]:
    if isinstance(content, str):
        return [_text(content)]
    return [part for block in content for part in block.parts()]


class UserMessage(RequestModel):
    """Message of the user, with the results of tools."""

    role: Literal["user"]
    content: str | list[Annotated[UserBlock, Field(discriminator="type")]]

    def chat_messages(self) -> Iterator[dict[str, Any]]:
        """Yield one tool message per tool result, and one user message per run of other blocks."""
        if not self.content or isinstance(self.content, str):
            yield {"role": "user", "content": self.content or ""}
            return
        for is_result, run in groupby(self.content, key=lambda block: isinstance(block, ToolResultBlock)):
            if is_result:
                yield from (block.message() for block in run if isinstance(block, ToolResultBlock))
            else:
                blocks = [block for block in run if not isinstance(block, ToolResultBlock)]
                yield {"role": "user", "content": _parts(blocks)}


class SystemMessage(RequestModel):
    role: Literal["system"]
    content: str | list[TextBlock]

    def chat_messages(self) -> Iterator[dict[str, Any]]:
        content = self.content if isinstance(self.content, str) else _parts(self.content)
        yield {"role": "system", "content": content}


class AssistantMessage(RequestModel):
    role: Literal["assistant"]
    content: str | list[Annotated[AssistantBlock, Field(discriminator="type")]]

    def chat_messages(self) -> Iterator[dict[str, Any]]:
        if isinstance(self.content, str):
            yield {"role": "assistant", "content": self.content}
            return
        thoughts = [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]
        message = {
            "role": "assistant",
            # thinking blocks split a text into several blocks
            "content": "".join(block.text for block in self.content if isinstance(block, TextBlock)),
            "tool_calls": [block.call() for block in self.content if isinstance(block, ToolUseBlock)],
            "reasoning_content": "\n".join(filter(None, thoughts)),
        }
        yield {key: value for key, value in message.items() if value}


InputMessage: TypeAlias = Annotated[
    UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")
]

# -- the request -------------------------------------------------------------------------------------------------------


class ToolDefinition(RequestModel):
    """Tool that the client executes."""

    ignored = ("cache_control", "eager_input_streaming")

    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    type: Annotated[Any, only("custom")] = None
    strict: bool | None = None
    allowed_callers: Annotated[Any, only(["direct"], [])] = None
    defer_loading: Annotated[Any, only(False)] = None
    input_examples: Annotated[Any, only([])] = None

    @model_validator(mode="before")
    @classmethod
    def _is_run_by_the_client(cls, tool: Any) -> Any:
        kind: Any = cast(dict[str, Any], tool).get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            shown = one_line(kind, max_length=80)
            raise unsupported(
                f"tools of type {shown!r} are not supported, because Anthropic defines or runs them; leave the tool "
                "out, or define it with a name and an input_schema",
                wish=f"tools.{kind}",
            )
        return cast(Any, tool)

    def as_chat(self) -> dict[str, Any]:
        more = without_none({"description": self.description, "strict": self.strict})
        return {"type": "function", "function": {"name": self.name, "parameters": self.input_schema, **more}}


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

    def as_chat(self) -> str | dict[str, Any]:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


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

    def as_chat(self) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": self.schema_}}


class OutputConfig(RequestModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Passed to the chat template if the template knows `reasoning_effort`."""
    format: OutputFormat | None = None


class ContextEdit(RequestModel):
    """Change that Anthropic's servers make to a conversation that gets long."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(max_length=128)]
    keep: Any = None


class ContextManagement(RequestModel):
    """Edits of the conversation. None is applied: the model sees the conversation as the client sent it."""

    edits: list[ContextEdit] = Field(default_factory=list[ContextEdit])

    @property
    def unapplied(self) -> list[str]:
        """Types of the edits that could change the prompt."""
        return [
            edit.type
            for edit in self.edits
            if not (edit.type.startswith("clear_thinking") and edit.keep == "all")
        ]


class PromptRequest(RequestModel):
    """Fields that both a message and a count of its tokens have."""

    ignored = ("cache_control", "billing_policy", "speed")

    model: str
    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Older name of `output_config.format`."""
    context_management: ContextManagement | None = None
    mcp_servers: Annotated[Any, only([])] = None

    @property
    def shows_thinking(self) -> bool:
        """Whether responses have thinking blocks."""
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def shows_thoughts(self) -> bool:
        """Whether thinking blocks have text."""
        return self.thinking is not None and self.thinking.display != "omitted"


class CountTokensRequest(PromptRequest):
    """Body of `/v1/messages/count_tokens`."""


def _refuse_thread(thread: Any) -> Any:
    # No wish, because a client that believes in its thread leaves out the earlier messages.
    if thread is not None:
        raise ValueError("conversations are not stored; send the whole conversation, without thread")
    return thread


class MessagesRequest(PromptRequest):
    """Body of `/v1/messages`."""

    ignored = (
        *PromptRequest.ignored,
        *("metadata", "service_tier", "inference_geo", "diagnostics", "fallback_credit_token"),
    )

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
    fallbacks: Annotated[Any, only([], "default")] = None
    thread: Annotated[Any, AfterValidator(_refuse_thread)] = None
    """Conversations are not stored. Clients that try it learn so from the error, and send whole conversations."""


# -- translation -------------------------------------------------------------------------------------------------------

BILLING_HEADER = "x-anthropic-billing-header:"
"""Beginning of a system block with which Claude Code addresses Anthropic's servers. The model does not see it."""
USUAL_EFFORT = "high"
"""Effort of requests that name none."""
THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Variables with which chat templates switch thinking, most common first."""


def translate_messages(request: PromptRequest, *, template: ChatTemplate) -> ChatCompletionRequest:
    """Return the equivalent chat request, of a message or of a count of its tokens."""
    messages: list[dict[str, Any]] = []
    system = request.system or ""
    if not isinstance(system, str):
        system = _parts([block for block in system if not block.text.startswith(BILLING_HEADER)])
    if system:
        messages.append({"role": "system", "content": system})
    for message in request.messages:
        messages += message.chat_messages()
    choice, config = request.tool_choice, request.output_config
    effort = None if config is None else config.effort
    if effort == USUAL_EFFORT and not template.mentions("reasoning_effort"):
        effort = None
    output_format = request.output_format if config is None or config.format is None else config.format
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": messages,
        "tools": [tool.as_chat() for tool in request.tools or ()] or None,
        "continue_final_message": _is_prefilled(messages) or None,
        "tool_choice": None if choice is None else choice.as_chat(),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "reasoning_effort": effort,
        "response_format": None if output_format is None else output_format.as_chat(),
        "chat_template_kwargs": _thinking(request, template),
    }
    if isinstance(request, MessagesRequest):
        fields |= {
            "max_tokens": request.max_tokens,
            "stop": request.stop_sequences or None,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "stream": request.stream,
            "stream_options": {"include_usage": True} if request.stream else None,
        }
    return ChatCompletionRequest.read(fields)


def _is_prefilled(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the model continues the last message."""
    last = messages[-1]
    if last["role"] != "assistant":
        return False
    if last.get("tool_calls") or last.get("reasoning_content") or not last.get("content"):
        raise RequestError(
            "the last message is an assistant's, which the model continues (prefill), and only text can be continued; "
            "remove its tool_use and thinking blocks, or end with a user message",
            param="messages",
        )
    return True


def _thinking(request: PromptRequest, template: ChatTemplate) -> dict[str, bool] | None:
    """Return the variable that switches thinking; None without a wish, or if the template has no such variable."""
    if request.thinking is None:
        return None
    known = [name for name in THINKING_VARIABLES if template.mentions(name)]
    return {known[0]: request.thinking.type != "disabled"} if known else None

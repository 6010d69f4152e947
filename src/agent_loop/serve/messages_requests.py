"""Request models of the Messages API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import RequestError
from agent_loop.runtime.describe import one_line
from agent_loop.serve.chat_requests import (
    MAX_STOPS,
    UNSUPPORTED,
    ChatCompletionRequest,
    FiniteFloat,
    Ignored,
    Only,
    RequestModel,
    StopText,
    read_part,
)


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


Part: TypeAlias = dict[str, Any]
"""Content part of a chat message."""


class Block(RequestModel):
    """Content block."""

    type: str
    cache_control: Ignored = None


class ContentBlock(Block):
    """Block that the model reads as content of a message."""

    def parts(self, *, where: str) -> list[Part]:
        """Return the content parts of the block, whose path in the request is `where`."""
        raise NotImplementedError


class TextBlock(ContentBlock):
    """Text."""

    text: str
    citations: Ignored = None
    """Passages that an earlier answer cited."""

    def parts(self, *, where: str) -> list[Part]:
        return [text_part(self.text)]


class ImageSource(RequestModel):
    """Image in the request. URLs and uploaded files are not supported."""

    type: Annotated[str, Only("base64")]
    media_type: str
    data: str


class ImageBlock(ContentBlock):
    """Image."""

    source: ImageSource

    def parts(self, *, where: str) -> list[Part]:
        url = f"data:{self.source.media_type};base64,{self.source.data}"
        return [{"type": "image_url", "image_url": {"url": url}}]


class DocumentSource(RequestModel):
    """Text of a document. PDF files, URLs and uploaded files are not supported."""

    type: Annotated[str, Only("text", "content")]
    media_type: Annotated[Any, Only("text/plain")] = None
    data: str | None = None
    content: str | list[dict[str, Any]] | None = None


class DocumentBlock(ContentBlock):
    """Document, which becomes text with a heading."""

    source: DocumentSource
    title: str | None = None
    context: str | None = None
    citations: Annotated[Any, Only({"enabled": False})] = None

    def parts(self, *, where: str) -> list[Part]:
        opening = "\n".join(filter(None, ["<document>", self.title, self.context]))
        return [text_part(opening), *self._inner(f"{where}.source.content"), text_part("</document>")]

    def _inner(self, where: str) -> list[Part]:
        content = self.source.content
        if content is None:
            return [text_part(self.source.data or "")]
        return _parts_of(content, where=where, kinds=SIMPLE)


class SearchResultBlock(ContentBlock):
    """Search result, which becomes text with its title and its source as a heading."""

    title: str
    source: str
    content: list[dict[str, Any]]
    citations: Annotated[Any, Only({"enabled": False})] = None

    def parts(self, *, where: str) -> list[Part]:
        opening = f"<search_result>\n{self.title}\n{self.source}"
        inner = content_parts(self.content, where=f"{where}.content", kinds=("text",))
        return [text_part(opening), *inner, text_part("</search_result>")]


class ToolUseBlock(Block):
    """Tool call of an assistant message."""

    id: str
    name: str
    input: dict[str, Any]
    caller: Annotated[Any, Only({"type": "direct"})] = None
    toolset_name: Annotated[Any, Only()] = None

    def call(self) -> dict[str, Any]:
        """Return the tool call of a chat message."""
        function = {"name": self.name, "arguments": json.dumps(self.input)}
        return {"type": "function", "id": self.id, "function": function}


class ToolResultBlock(Block):
    """Result of a tool call."""

    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    toolset_name: Annotated[Any, Only()] = None

    def message(self, *, where: str) -> dict[str, Any]:
        """Return the chat message of the tool. The text of a failed call begins with `Error: `."""
        parts = _parts_of(self.content or "", where=f"{where}.content", kinds=RICH)
        if self.is_error and parts and parts[0]["type"] == "text":
            parts[0] = text_part(f"Error: {parts[0]['text']}")
        elif self.is_error:
            parts.insert(0, text_part("Error:"))
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": parts}


class ThinkingBlock(Block):
    """Reasoning of an assistant message."""

    thinking: str
    signature: Ignored = None


class RedactedThinkingBlock(Block):
    """Encrypted reasoning of another model, which is left out."""

    data: Ignored = None


BLOCKS: Mapping[str, type[Block]] = {
    "text": TextBlock,
    "image": ImageBlock,
    "document": DocumentBlock,
    "search_result": SearchResultBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
}
SIMPLE = ("text", "image")
RICH = (*SIMPLE, "document", "search_result")
USER = (*RICH, "tool_result")
ASSISTANT = ("text", "tool_use", "thinking", "redacted_thinking")


def read_block(block: Mapping[str, Any], *, where: str, kinds: Sequence[str]) -> Block:
    """Validate a block of one of these types, whose path in the request is `where`."""
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        shown = one_line(json.dumps(kind), max_length=80)
        raise RequestError(
            f"{where}: blocks of type {shown} are not supported here; give {', '.join(kinds)}", param=where
        )
    return read_part(BLOCKS[kind], block, where=where)


def content_parts(
    blocks: Sequence[Mapping[str, Any]], *, where: str, kinds: Sequence[str], start: int = 0
) -> list[Part]:
    """Return the content parts of blocks. The first one has the index `start` in the request."""
    parts: list[Part] = []
    for index, block in enumerate(blocks, start=start):
        path = f"{where}[{index}]"
        read = read_block(block, where=path, kinds=kinds)
        assert isinstance(read, ContentBlock), "kinds are types of content"
        parts += read.parts(where=path)
    return parts


def _parts_of(content: str | list[dict[str, Any]], *, where: str, kinds: Sequence[str]) -> list[Part]:
    if isinstance(content, str):
        return [text_part(content)]
    return content_parts(content, where=where, kinds=kinds)


def text_part(text: str) -> Part:
    """Return a content part with a text."""
    return {"type": "text", "text": text}


BILLING_HEADER = "x-anthropic-billing-header:"
"""Beginning of a system block with which Claude Code addresses Anthropic's servers. The model does not see it."""
_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}
USUAL_EFFORT = "high"
"""Effort of requests that name none."""
THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Variables with which chat templates switch thinking, most common first."""


def translate_messages(request: PromptRequest, *, template: ChatTemplate) -> ChatCompletionRequest:
    """Return the equivalent chat request, of a message or of a count of its tokens.

    Args:
        request: The request.
        template: Chat template of the model, whose thinking the request may switch.
    """
    messages: list[dict[str, Any]] = []
    system = _system(request.system)
    if system:
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(request.messages):
        messages += _messages(message, where=f"messages[{index}]")
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": messages,
        "tools": [_tool(tool) for tool in request.tools or ()] or None,
        "continue_final_message": _is_prefilled(messages) or None,
        **_choice_fields(request.tool_choice),
        **_output_fields(request, template),
        "chat_template_kwargs": _thinking(request, template),
        **(_sampling_fields(request) if isinstance(request, MessagesRequest) else {}),
    }
    return ChatCompletionRequest.read({key: value for key, value in fields.items() if value is not None})


def _system(system: str | Sequence[Mapping[str, Any]] | None) -> str | list[dict[str, Any]]:
    if system is None or isinstance(system, str):
        return system or ""
    parts = content_parts(system, where="system", kinds=("text",))
    return [part for part in parts if not part["text"].startswith(BILLING_HEADER)]


def _messages(message: InputMessage, *, where: str) -> Iterator[dict[str, Any]]:
    content = message.content
    if isinstance(content, str):
        yield {"role": message.role, "content": content}
    elif message.role == "assistant":
        yield _assistant(content, where=f"{where}.content")
    elif message.role == "system":
        parts = content_parts(content, where=f"{where}.content", kinds=("text",))
        yield {"role": "system", "content": parts}
    else:
        yield from _user(content, where=f"{where}.content")


def _assistant(blocks: Sequence[Mapping[str, Any]], *, where: str) -> dict[str, Any]:
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for index, block in enumerate(blocks):
        match read_block(block, where=f"{where}[{index}]", kinds=ASSISTANT):
            case TextBlock(text=text):
                texts.append(text)
            case ThinkingBlock(thinking=thought):
                thoughts.append(thought)
            case ToolUseBlock() as call:
                calls.append(call.call())
            case _:  # redacted thinking cannot be read
                pass
    message = {
        "role": "assistant",
        "content": "".join(texts),  # thinking blocks split a text into several blocks
        "tool_calls": calls,
        "reasoning_content": "\n".join(filter(None, thoughts)),
    }
    return {key: value for key, value in message.items() if value}


def _user(blocks: Sequence[Mapping[str, Any]], *, where: str) -> Iterator[dict[str, Any]]:
    """Yield one tool message per tool result, and one user message per run of other blocks."""
    if not blocks:
        yield {"role": "user", "content": ""}
    for is_result, run in groupby(enumerate(blocks), key=lambda each: each[1].get("type") == "tool_result"):
        if is_result:
            for index, block in run:
                path = f"{where}[{index}]"
                result = read_block(block, where=path, kinds=USER)
                assert isinstance(result, ToolResultBlock)
                yield result.message(where=path)
            continue
        parts: list[dict[str, Any]] = []
        for index, block in run:
            parts += content_parts([block], where=where, kinds=RICH, start=index)
        yield {"role": "user", "content": parts}


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


def _tool(tool: ToolDefinition) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice_fields(choice: ToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    named = {"type": "function", "function": {"name": choice.name}}
    return {
        "tool_choice": named if choice.type == "tool" else _CHOICES[choice.type],
        "parallel_tool_calls": False if choice.disable_parallel_tool_use else None,
    }


def _output_fields(request: PromptRequest, template: ChatTemplate) -> dict[str, Any]:
    config = request.output_config
    effort = None if config is None else config.effort
    if effort == USUAL_EFFORT and not template.mentions("reasoning_effort"):
        effort = None
    output_format = request.output_format if config is None or config.format is None else config.format
    return {
        "reasoning_effort": effort,
        "response_format": None if output_format is None else _response_format(output_format),
    }


def _thinking(request: PromptRequest, template: ChatTemplate) -> dict[str, bool] | None:
    """Return the variable that switches thinking; None without a wish, or if the template has no such variable."""
    if request.thinking is None:
        return None
    known = [name for name in THINKING_VARIABLES if template.mentions(name)]
    return {known[0]: request.thinking.type != "disabled"} if known else None


def _response_format(output_format: OutputFormat) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": output_format.schema_}}


def _sampling_fields(request: MessagesRequest) -> dict[str, Any]:
    return {
        "max_tokens": request.max_tokens,
        "stop": request.stop_sequences or None,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stream": request.stream,
        "stream_options": {"include_usage": True} if request.stream else None,
    }

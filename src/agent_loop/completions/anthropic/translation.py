"""Translates requests of the Messages API to chat requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from agent_loop.chat.template import ChatTemplate
from agent_loop.completions.anthropic.blocks import (
    ASSISTANT,
    RICH,
    USER,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    content_parts,
    read_block,
)
from agent_loop.completions.anthropic.requests import (
    InputMessage,
    MessagesRequest,
    OutputFormat,
    PromptRequest,
    ToolChoice,
    ToolDefinition,
)
from agent_loop.completions.requests import ChatCompletionRequest
from agent_loop.errors import RequestError

BILLING_HEADER = "x-anthropic-billing-header:"
"""Beginning of a system block with which Claude Code addresses Anthropic's servers. The model does not see it."""
_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}
USUAL_EFFORT = "high"
"""Effort of requests that name none."""
THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Variables with which chat templates switch thinking, most common first."""


def to_chat_request(request: PromptRequest, *, template: ChatTemplate) -> ChatCompletionRequest:
    """Return the equivalent chat request, of a message or of a count of its tokens.

    Args:
        request: The request.
        template: Chat template of the model, whose thinking the request may switch.

    Raises:
        RequestError: A block or a field is not supported.
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
    """Return whether the model continues the last message.

    Raises:
        RequestError: The last message is an assistant's, and has calls or thinking.
    """
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

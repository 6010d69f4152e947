"""Translates requests of the Messages API to chat requests, and chat completions to messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, cast

from agent_loop.completions.anthropic.requests import InputMessage, MessagesRequest
from agent_loop.completions.anthropic.response_models import (
    ContentBlock,
    MessageResponse,
    MessageUsage,
    StopReasonName,
)
from agent_loop.completions.requests import ChatCompletionRequest
from agent_loop.completions.response_models import AssistantMessage, ChatCompletion, FinishReason, Usage
from agent_loop.errors import RequestError
from agent_loop.runtime.describe import one_line

_STOP_REASONS: Mapping[FinishReason, StopReasonName] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


def to_chat_request(request: MessagesRequest) -> ChatCompletionRequest:
    """Return the equivalent chat request.

    Raises:
        RequestError: A block has an unsupported type, or the last message is an assistant's.
    """
    if request.messages[-1].role == "assistant":
        raise RequestError(
            "messages ends with an assistant message (prefill), which is not supported, because all tokens of an "
            "assistant message must be sampled by the model; end with a user message, and describe there how the "
            "response should begin",
            param="messages",
        )
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _system(request.system)})
    for index, message in enumerate(request.messages):
        messages += _messages(message, where=f"messages[{index}]")
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": messages,
        "max_tokens": request.max_tokens,
        "tools": [_tool(tool.model_dump(exclude_none=True)) for tool in request.tools or ()] or None,
        "tool_choice": None if request.tool_choice is None else request.tool_choice.type,
        "stop": request.stop_sequences or None,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stream": request.stream,
        "stream_options": {"include_usage": True} if request.stream else None,
    }
    return ChatCompletionRequest.read({key: value for key, value in fields.items() if value is not None})


def to_message(completion: ChatCompletion, *, shows_thinking: bool) -> MessageResponse:
    """Return a chat completion as a message."""
    [choice] = completion.choices
    return MessageResponse(
        id=completion.id.replace("chatcmpl-", "msg_"),
        model=completion.model,
        content=list(_blocks(choice.message, shows_thinking=shows_thinking)),
        stop_reason=stop_reason_of(choice.finish_reason, stop_text=choice.stop_reason),
        stop_sequence=choice.stop_reason,
        usage=usage_of(completion.usage),
    )


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


def _blocks(message: AssistantMessage, *, shows_thinking: bool) -> Iterator[ContentBlock]:
    if shows_thinking and message.reasoning_content:
        yield ContentBlock(type="thinking", thinking=message.reasoning_content, signature="")
    if message.content:
        yield ContentBlock(type="text", text=message.content)
    for call in message.tool_calls or ():
        arguments = json.loads(call.function.arguments)
        yield ContentBlock(type="tool_use", id=call.id, name=call.function.name, input=arguments)


def _system(system: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    if isinstance(system, str):
        return system
    return [_part(block, where=f"system[{index}]") for index, block in enumerate(system)]


def _messages(message: InputMessage, *, where: str) -> Iterator[dict[str, Any]]:
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
    elif message.role == "assistant":
        yield _assistant(message.content, where=where)
    else:
        yield from _user(message.content, where=where)


def _assistant(blocks: Sequence[Mapping[str, Any]], *, where: str) -> dict[str, Any]:
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for index, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(_string(block, "thinking", where=f"{where}.content[{index}]"))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"type": "function", "id": block.get("id"), "function": function})
        elif kind != "redacted_thinking":
            texts.append(_text(block, where=f"{where}.content[{index}]"))
    message = {
        "role": "assistant",
        "content": "".join(texts),  # thinking blocks split a text into several blocks
        "tool_calls": calls,
        "reasoning_content": "\n".join(thoughts),
    }
    return {key: value for key, value in message.items() if value}


def _user(blocks: Sequence[Mapping[str, Any]], *, where: str) -> Iterator[dict[str, Any]]:
    """Yield one tool message per tool result, and one user message per run of other blocks."""
    for is_result, run in groupby(enumerate(blocks), key=lambda each: each[1].get("type") == "tool_result"):
        if not is_result:
            parts = [_part(block, where=f"{where}.content[{index}]") for index, block in run]
            yield {"role": "user", "content": parts}
            continue
        for index, block in run:
            path = f"{where}.content[{index}]"
            call_id = _string(block, "tool_use_id", where=path)
            yield {"role": "tool", "tool_call_id": call_id, "content": _result(block, where=path)}


def _result(block: Mapping[str, Any], *, where: str) -> str | list[dict[str, Any]]:
    """Return the content of a tool result, which may be null, a text or a list of blocks."""
    content: Any = block.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    blocks = cast(list[Any], content) if isinstance(content, list) else None
    if blocks is None or not all(isinstance(inner, dict) for inner in blocks):
        raise RequestError(f"{where}.content must be a string or a list of blocks", param=f"{where}.content")
    return [_part(inner, where=f"{where}.content[{number}]") for number, inner in enumerate(blocks)]


def _string(block: Mapping[str, Any], name: str, *, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return value


def _text(block: Mapping[str, Any], *, where: str) -> str:
    part = _part(block, where=where)
    if part["type"] != "text":
        raise RequestError(f"{where}: an assistant message cannot contain images; give text", param=where)
    return part["text"]


def _part(block: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    kind = block.get("type")
    if kind == "text" and isinstance(block.get("text"), str):
        return {"type": "text", "text": block["text"]}
    source = block.get("source")
    if kind == "image" and isinstance(source, Mapping):
        image = cast(Mapping[str, Any], source)
        if image.get("type") == "base64":
            return {
                "type": "image_url",
                "image_url": {"url": f"data:{image.get('media_type')};base64,{image.get('data')}"},
            }
    shown = one_line(json.dumps(kind), max_length=80)
    raise RequestError(
        f"{where}: blocks of type {shown} are not supported; give text, an image as base64, tool_use or tool_result",
        param=where,
    )


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    for key in ("description", "strict"):
        if key in tool:
            function[key] = tool[key]
    return {"type": "function", "function": function}

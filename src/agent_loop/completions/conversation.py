"""Converts the messages of a request for chat templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

from agent_loop.chat.parsers.json_calls import JsonFault, decode_json
from agent_loop.completions.requests import ChatCompletionRequest, ChatMessage
from agent_loop.errors import RequestError
from agent_loop.runtime.describe import one_line
from agent_loop.types import Message


def conversation_of(messages: Sequence[ChatMessage]) -> list[Message]:
    """Return the messages in the form that a `ChatTemplate` takes.

    The role `developer` becomes `system`. Content parts that are all text become one text, joined by line breaks.
    Arguments of calls become mappings.

    Raises:
        RequestError: A content part has an unknown type, an image is not a data URL, or a call is not valid.
    """
    return [_message(message, where=f"messages[{index}]") for index, message in enumerate(messages)]


def split_prefill(request: ChatCompletionRequest, messages: Sequence[Message]) -> tuple[list[Message], str]:
    """Return the messages before the completion, and the text that the completion continues.

    The text is empty unless the request sets `continue_final_message`.

    Raises:
        RequestError: The last message is not an assistant text that can be continued.
    """
    continues = bool(request.continue_final_message)
    if request.add_generation_prompt is not None and request.add_generation_prompt == continues:
        raise RequestError(
            f"add_generation_prompt and continue_final_message are both {str(continues).lower()}; leave "
            "add_generation_prompt out",
            param="add_generation_prompt",
        )
    if not continues:
        return list(messages), ""
    *earlier, last = messages
    text = last["content"]
    is_text_alone = (
        isinstance(text, str) and text and not last.get("tool_calls") and not last.get("reasoning_content")
    )
    if last["role"] != "assistant" or not is_text_alone:
        raise RequestError(
            "continue_final_message: the last message must be an assistant message with a text, and without tool_calls "
            "or reasoning_content; change the last message, or leave continue_final_message out",
            param="continue_final_message",
        )
    if not earlier:
        raise RequestError(
            "continue_final_message: there is no message before the last one; add the message that it answers",
            param="messages",
        )
    return earlier, text


def _message(message: ChatMessage, *, where: str) -> Message:
    role = "system" if message.role == "developer" else message.role
    written: Message = {"role": role, "content": _content(message.content, where=f"{where}.content")}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, key)) is not None:
            written[key] = value
    if message.tool_calls and role != "assistant":
        raise RequestError(
            f"{where}.tool_calls: only assistant messages may have tool calls; remove them",
            param=f"{where}.tool_calls",
        )
    if message.tool_calls:
        written["tool_calls"] = [
            _call(call, where=f"{where}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ]
    return written


def _content(content: str | list[dict[str, Any]] | None, *, where: str) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_part(part, where=f"{where}[{index}]") for index, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(part: dict[str, Any], *, where: str) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image_url":
        image: Any = part.get("image_url")
        url: Any = cast(dict[str, Any], image).get("url") if isinstance(image, dict) else image
        # Paths and other URLs are refused: they would make this machine read its files or send requests.
        if isinstance(url, str) and url.startswith("data:"):
            return {"type": "image_url", "image_url": {"url": url}}
        raise RequestError(
            f"{where}.image_url: only images inside the request are supported; give a data URL", param=where
        )
    raise RequestError(
        f"{where}: type is {one_line(json.dumps(kind), max_length=80)}; give text (with a text) or image_url",
        param=where,
    )


def _call(call: dict[str, Any], *, where: str) -> dict[str, Any]:
    function: Any = call.get("function")
    name: Any = cast(dict[str, Any], function).get("name") if isinstance(function, dict) else None
    if call.get("type", "function") != "function" or not isinstance(name, str) or not name:
        raise RequestError(
            f"{where} is not a function call with a name; give type and function.name", param=where
        )
    arguments: Any = cast(dict[str, Any], function).get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = decode_json(arguments) if arguments.strip() else {}
        except JsonFault as error:
            raise RequestError(
                f"{where}.function.arguments is not valid JSON: {error}", param=where
            ) from error
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise RequestError(f"{where}.function.arguments must hold a JSON object", param=where)
    call_id: Any = call.get("id")
    if call_id is not None and not isinstance(call_id, str):
        raise RequestError(f"{where}.id must be a string", param=where)
    return {
        "type": "function",
        "id": call_id or "",
        "function": {"name": name, "arguments": arguments},
    }

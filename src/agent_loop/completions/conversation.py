"""Converts the messages of a request for chat templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

from agent_loop.chat.messages import MessageError, normalise_messages
from agent_loop.completions.requests import ChatCompletionRequest, ChatMessage
from agent_loop.errors import RequestError
from agent_loop.runtime.describe import one_line
from agent_loop.types import Message

_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")


def conversation_of(messages: Sequence[ChatMessage]) -> list[Message]:
    """Return the messages in the form that a `ChatTemplate` takes. See `normalise_messages`.

    Raises:
        RequestError: A content part has an unknown type, an image is not a data URL, or a call is not valid.
    """
    given = [_as_mapping(message, where=f"messages[{index}]") for index, message in enumerate(messages)]
    try:
        return normalise_messages(given, where="messages")
    except MessageError as error:
        raise RequestError(str(error), param=error.where) from error


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


def _as_mapping(message: ChatMessage, *, where: str) -> dict[str, Any]:
    given = {key: getattr(message, key) for key in _KEYS}
    if isinstance(message.content, list):
        given["content"] = [
            _part(part, where=f"{where}.content[{index}]") for index, part in enumerate(message.content)
        ]
    return given


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

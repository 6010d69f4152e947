"""Chat requests of agent programs."""

from __future__ import annotations

from typing import Any, cast

from pydantic import model_validator

from agent_loop.completions.requests import ChatCompletionRequest, ChatMessage


class SessionChatRequest(ChatCompletionRequest):
    """Chat request whose assistant messages may have unknown fields, which agent frameworks add. They are ignored."""

    @model_validator(mode="before")
    @classmethod
    def _without_unknown_fields(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        fields = cast(dict[str, Any], body)
        messages: Any = fields.get("messages")
        if not isinstance(messages, list):
            return fields
        return {**fields, "messages": [_known_fields(message) for message in cast(list[Any], messages)]}


def _known_fields(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    fields = cast(dict[str, Any], message)
    if fields.get("role") != "assistant":
        return fields
    return {key: value for key, value in fields.items() if key in ChatMessage.model_fields}

"""What programs ask: the OpenAI request, read as programs write it."""

from __future__ import annotations

from typing import Any, cast

from pydantic import model_validator

from agent_loop.completions.requests import ChatCompletionRequest, ChatMessage


class SessionChatRequest(ChatCompletionRequest):
    """A chat request whose assistant messages may hold whatever frameworks note there: the model's words are known."""

    @model_validator(mode="before")
    @classmethod
    def _without_notes(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        fields = cast(dict[str, Any], body)
        messages: Any = fields.get("messages")
        if not isinstance(messages, list):
            return fields
        return {**fields, "messages": [_plain(message) for message in cast(list[Any], messages)]}


def _plain(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    fields = cast(dict[str, Any], message)
    if fields.get("role") != "assistant":
        return fields
    return {key: value for key, value in fields.items() if key in ChatMessage.model_fields}

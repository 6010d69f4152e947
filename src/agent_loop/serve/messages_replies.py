"""Writes replies of the Messages API, whole or as a stream of events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from agent_loop.serve.chat_replies import (
    AssistantMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ErrorDetail,
    ErrorResponse,
    FinishReason,
    ModelCard,
    ToolCallDelta,
    Usage,
)
from agent_loop.serve.messages_requests import MessagesRequest, PromptRequest

_STOP_REASONS: Mapping[FinishReason, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
_ERROR_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    410: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessageWriter:
    """Writes one message. Used for one completion, which is either whole or streamed.

    A block of text or thinking opens with its first characters and closes when the next block opens.

    Args:
        request: The request, which says whether the message shows thinking.
    """

    def __init__(self, request: PromptRequest) -> None:
        self._request = request
        self._has_started = False
        self._num_blocks = 0
        self._open: str | None = None
        """Type of the open block."""
        self._finish_reason: FinishReason = "stop"
        self._stop_text: str | None = None
        self._usage: Usage | None = None

    def whole(self, completion: ChatCompletion) -> Mapping[str, Any]:
        """Return the message of a whole completion."""
        [choice] = completion.choices
        return {
            **_message(completion.id, model=completion.model, usage=completion.usage),
            "content": list(self._blocks(choice.message)),
            **_stop(choice.finish_reason, choice.stop_reason),
            **_edits(self._request),
        }

    def chunk(self, chunk: ChatCompletionChunk) -> bytes:
        """Return the events of one chunk."""
        events = b"" if self._has_started else self._start(chunk)
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices:
            if choice.delta.reasoning_content and self._request.shows_thinking:
                thinking = choice.delta.reasoning_content if self._request.shows_thoughts else ""
                events += self._add_text("thinking", thinking)
            if choice.delta.content:
                events += self._add_text("text", choice.delta.content)
            for call in choice.delta.tool_calls or ():
                events += self._add_call(call)
            self._finish_reason = choice.finish_reason or self._finish_reason
            self._stop_text = choice.stop_reason or self._stop_text
        return events

    def end(self) -> bytes:
        """Return the events after the last chunk."""
        stop = _stop(self._finish_reason, self._stop_text)
        last = _event("message_delta", delta=stop, usage=_usage(self._usage), **_edits(self._request))
        return self._close() + last + _event("message_stop")

    def error(self, error: ErrorResponse) -> bytes:
        """Return the last event of a failed stream."""
        return _event("error", error=_error(error, kind="api_error"))

    def _blocks(self, message: AssistantMessage) -> Iterator[Mapping[str, Any]]:
        if self._request.shows_thinking and message.reasoning_content:
            thinking = message.reasoning_content if self._request.shows_thoughts else ""
            yield {"type": "thinking", "thinking": thinking, "signature": ""}
        if message.content:
            yield {"type": "text", "text": message.content}
        for call in message.tool_calls or ():
            arguments = json.loads(call.function.arguments)
            yield {"type": "tool_use", "id": call.id, "name": call.function.name, "input": arguments}

    def _start(self, chunk: ChatCompletionChunk) -> bytes:
        self._has_started = True
        message: dict[str, Any] = {
            **_message(chunk.id, model=chunk.model, usage=None),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        return _event("message_start", message=message) + _event("ping")

    def _add_text(self, kind: str, text: str) -> bytes:
        events = b""
        if self._open != kind:
            block = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
            events = self._close() + self._open_block(block, kind)
        return events + (self._delta({"type": f"{kind}_delta", kind: text}) if text else b"")

    def _add_call(self, call: ToolCallDelta) -> bytes:
        block: dict[str, Any] = {"type": "tool_use", "id": call.id, "name": call.function.name, "input": {}}
        arguments = {"type": "input_json_delta", "partial_json": call.function.arguments}
        return self._close() + self._open_block(block, "tool_use") + self._delta(arguments) + self._close()

    def _open_block(self, block: dict[str, Any], kind: str) -> bytes:
        self._open = kind
        return _event("content_block_start", index=self._num_blocks, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open, index = None, self._num_blocks
        self._num_blocks += 1
        return _event("content_block_stop", index=index)


def token_count(num_tokens: int, *, request: PromptRequest) -> Mapping[str, Any]:
    """Return a number of prompt tokens as a response."""
    edits = {"context_management": {"original_input_tokens": num_tokens}}
    return {"input_tokens": num_tokens, **({} if request.context_management is None else edits)}


def model_info(card: ModelCard) -> Mapping[str, Any]:
    """Return the description of a model."""
    created = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
    length = {} if card.max_model_len is None else {"max_input_tokens": card.max_model_len}
    return {
        "id": card.id,
        "type": "model",
        "display_name": card.id,
        "created_at": created,
        "lifecycle": "active",
        **length,
    }


def model_info_list(card: ModelCard) -> Mapping[str, Any]:
    """Return a list with one model."""
    return {"data": [model_info(card)], "has_more": False, "first_id": card.id, "last_id": card.id}


def messages_error(response: ErrorResponse, *, status: int, request_id: str | None) -> Mapping[str, Any]:
    """Return the body of the response to a request that failed with this HTTP status."""
    error = _error(response, kind=_ERROR_KINDS.get(status, "api_error"))
    return {"type": "error", "error": error, "request_id": request_id}


def _error(response: ErrorResponse, *, kind: str) -> dict[str, Any]:
    """Return an error. Its `code` is an extension: the code that the OpenAI API would give."""
    error = response.error
    shown: dict[str, Any] = {"type": kind, "message": _renamed(error)}
    if error.code is not None:
        shown["code"] = error.code
    if error.param == "thread":  # tells clients to send whole conversations
        shown["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return shown


def _renamed(error: ErrorDetail) -> str:
    """Return the message of an error about a chat request, with the name that its parameter has in this API."""
    parameter = error.param or ""
    if parameter in MessagesRequest.names_here and error.message.startswith(parameter):
        return MessagesRequest.names_here[parameter] + error.message.removeprefix(parameter)
    return error.message


def _message(completion_id: str, *, model: str, usage: Usage | None) -> dict[str, Any]:
    return {
        "id": completion_id.replace("chatcmpl-", "msg_"),
        "type": "message",
        "role": "assistant",
        "model": model,
        "usage": _usage(usage),
    }


def _stop(finish_reason: FinishReason, stop_text: str | None) -> dict[str, Any]:
    reason = "stop_sequence" if stop_text is not None else _STOP_REASONS[finish_reason]
    return {"stop_reason": reason, "stop_sequence": stop_text}


def _edits(request: PromptRequest) -> dict[str, Any]:
    """Return the report of applied edits, if the request asks for edits. There are never any."""
    return {} if request.context_management is None else {"context_management": {"applied_edits": []}}


def _usage(usage: Usage | None) -> dict[str, Any]:
    """Return token counts. Cached prompt tokens are counted separately."""
    if usage is None:
        return {"input_tokens": 0, "output_tokens": 0, "service_tier": "standard"}
    cached = 0 if usage.prompt_tokens_details is None else usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "output_tokens": usage.completion_tokens,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "service_tier": "standard",
    }


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()

"""Converts streamed chat completions to the server-sent events of the Messages API."""

from __future__ import annotations

import json
from typing import Any

from agent_loop.completions.anthropic.messages import edits_of, message_id, stop_reason_of, usage_of
from agent_loop.completions.anthropic.requests import PromptRequest
from agent_loop.completions.response_models import (
    ChatCompletionChunk,
    FinishReason,
    ResponseModel,
    ToolCallDelta,
    Usage,
)


class EventWriter:
    """Writes the events of one stream.

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

    def write(self, chunk: ResponseModel) -> bytes:
        """Return the events of one chunk."""
        assert isinstance(chunk, ChatCompletionChunk)
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
        stop = {
            "stop_reason": stop_reason_of(self._finish_reason, stop_text=self._stop_text),
            "stop_sequence": self._stop_text,
        }
        fields: dict[str, Any] = {"delta": stop, "usage": usage_of(self._usage).model_dump()}
        if (edits := edits_of(self._request)) is not None:
            fields["context_management"] = edits.model_dump()
        return self._close() + event("message_delta", **fields) + event("message_stop")

    def _start(self, chunk: ChatCompletionChunk) -> bytes:
        self._has_started = True
        message: dict[str, Any] = {
            "id": message_id(chunk.id),
            "type": "message",
            "role": "assistant",
            "model": chunk.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(None).model_dump(),
        }
        return event("message_start", message=message) + event("ping")

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
        return event("content_block_start", index=self._num_blocks, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event("content_block_delta", index=self._num_blocks, delta=delta)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open, index = None, self._num_blocks
        self._num_blocks += 1
        return event("content_block_stop", index=index)


def event(kind: str, **fields: Any) -> bytes:
    """Return one server-sent event."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()

"""Writes replies of the Messages API, whole or as a stream of events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from agent_loop.serve.chat_replies import (
    JsonObject,
    Usage,
    arguments_text,
    server_sent_event,
)
from agent_loop.serve.completions import FinishReason, ReplyChunk
from agent_loop.serve.errors import ErrorReply
from agent_loop.serve.messages_requests import MessagesRequest, PromptRequest

_STOP_REASONS: Mapping[FinishReason, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


class MessageWriter:
    """Writes one message.

    A block of text or thinking opens with its first characters and closes when the next block opens.
    """

    def __init__(self, request: MessagesRequest) -> None:
        self._request = request
        self._chunks: list[ReplyChunk] = []
        self._num_blocks = 0
        self._open: str | None = None
        """Type of the open block."""

    def whole(self, chunks: Sequence[ReplyChunk]) -> JsonObject:
        turn = ReplyChunk.joined(chunks)
        content: list[JsonObject] = []
        if turn.delta.reasoning and self._request.shows_thinking:
            content.append({"type": "thinking", "thinking": self._shown(turn), "signature": ""})
        if turn.delta.content:
            content.append({"type": "text", "text": turn.delta.content})
        content += [
            {"type": "tool_use", "id": call_id, "name": call.name, "input": call.arguments}
            for call_id, call in turn.calls.items()
        ]
        return {**self._message(turn), "content": content, **self._ending(chunks)}

    def chunk(self, chunk: ReplyChunk) -> bytes:
        events = b""
        if not self._chunks:
            unfinished: JsonObject = {"content": [], "stop_reason": None, "stop_sequence": None}
            message = {**self._message(chunk), **unfinished, "usage": _usage(Usage.of([chunk]))}
            events = _event("message_start", message=message) + _event("ping")
        self._chunks.append(chunk)
        if chunk.delta.reasoning and self._request.shows_thinking:
            events += self._add_text("thinking", self._shown(chunk))
        if chunk.delta.content:
            events += self._add_text("text", chunk.delta.content)
        for call_id, call in chunk.calls.items():
            block: JsonObject = {"type": "tool_use", "id": call_id, "name": call.name, "input": {}}
            events += self._begin_block(block)
            events += self._delta({"type": "input_json_delta", "partial_json": arguments_text(call)})
        return events

    def end(self) -> bytes:
        ending = self._ending(self._chunks)
        usage, edits = ending.pop("usage"), ending.pop("context_management", None)
        more = {} if edits is None else {"context_management": edits}
        return (
            self._end_block()
            + _event("message_delta", delta=ending, usage=usage, **more)
            + _event("message_stop")
        )

    def error(self, error: ErrorReply) -> bytes:
        return _event("error", error=error.as_messages_detail())

    def _message(self, chunk: ReplyChunk) -> JsonObject:
        return {
            "id": f"msg_{chunk.head.id}",
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
        }

    def _ending(self, chunks: Sequence[ReplyChunk]) -> JsonObject:
        last = ReplyChunk.joined(chunks)
        stop_text = last.stop_text
        reason = "stop_sequence" if stop_text is not None else _STOP_REASONS[last.finish_reason or "stop"]
        ending = {"stop_reason": reason, "stop_sequence": stop_text, "usage": _usage(Usage.of(chunks))}
        if self._request.context_management is not None:
            ending["context_management"] = {"applied_edits": []}
        return ending

    def _shown(self, chunk: ReplyChunk) -> str:
        return chunk.delta.reasoning if self._request.shows_thoughts else ""

    def _add_text(self, kind: str, text: str) -> bytes:
        events = b""
        if self._open != kind:
            events = self._begin_block(
                {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
            )
        return events + (self._delta({"type": f"{kind}_delta", kind: text}) if text else b"")

    def _begin_block(self, block: JsonObject) -> bytes:
        ended = self._end_block()
        self._open = str(block["type"])
        return ended + _event("content_block_start", index=self._num_blocks, content_block=block)

    def _delta(self, delta: JsonObject) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _end_block(self) -> bytes:
        if self._open is None:
            return b""
        self._open, index = None, self._num_blocks
        self._num_blocks += 1
        return _event("content_block_stop", index=index)


def token_count(num_tokens: int, *, request: PromptRequest) -> JsonObject:
    """Return a number of prompt tokens as a response."""
    edits = {"context_management": {"original_input_tokens": num_tokens}}
    return {"input_tokens": num_tokens, **({} if request.context_management is None else edits)}


def model_info(card: Mapping[str, Any]) -> JsonObject:
    """Return the description of a model, from the one in OpenAI's format."""
    length = card.get("max_model_len")
    return {
        "id": card["id"],
        "type": "model",
        "display_name": card["id"],
        "created_at": datetime.fromtimestamp(card["created"], UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        **({} if length is None else {"max_input_tokens": length}),
    }


def model_info_list(card: Mapping[str, Any]) -> JsonObject:
    """Return a list with one model."""
    return {"data": [model_info(card)], "has_more": False, "first_id": card["id"], "last_id": card["id"]}


def _usage(usage: Usage) -> JsonObject:
    """Return token counts. Cached prompt tokens are counted separately."""
    cached = usage.cached_tokens or 0
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "output_tokens": usage.completion_tokens,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "service_tier": "standard",
    }


def _event(kind: str, **fields: Any) -> bytes:
    return server_sent_event({"type": kind, **fields}, kind=kind)

"""Writes replies of the Responses API, whole or as a stream of events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_loop.chat.template import ChatTemplate
from agent_loop.serve.chat_replies import (
    JsonObject,
    Usage,
    arguments_text,
    server_sent_event,
    token_logprobs,
)
from agent_loop.serve.completions import ReplyChunk
from agent_loop.serve.errors import ErrorReply
from agent_loop.serve.fields import RequestModel
from agent_loop.serve.responses_requests import CallRecord, TranslatedResponse, write_encrypted
from agent_loop.serve.responses_tools import CUSTOM_INPUT, ToolOrigin
from agent_loop.types import ToolCall


@dataclass(slots=True)
class _OpenItem:
    """Output item whose text grows."""

    index: int
    id: str
    text: str = ""


class ResponseWriter:
    """Writes one response.

    Reasoning ends when text follows. The message stays open until the first call or the end, so that a turn has one
    message. The private methods return the events that they cause.
    """

    def __init__(self, translated: TranslatedResponse, *, template: ChatTemplate, calls: CallRecord) -> None:
        self._request = translated.request
        self._origins = translated.origins
        self._has_logprobs = bool(translated.chat.logprobs)
        self._template = template
        self._calls = calls
        self._chunks: list[ReplyChunk] = []
        self._items: list[JsonObject | None] = []
        """Finished items; None for an item that is still open."""
        self._reasoning: _OpenItem | None = None
        self._message: _OpenItem | None = None
        self._logprobs: list[JsonObject] = []
        self._num_logprobs_sent = 0
        self._num_events = 0

    # -- whole and streamed ----------------------------------------------------------------------------------------

    def whole(self, chunks: Sequence[ReplyChunk]) -> JsonObject:
        self._chunks = list(chunks)
        self._add(ReplyChunk.joined(chunks))
        self._finish()
        return self._response(self._status)

    def chunk(self, chunk: ReplyChunk) -> bytes:
        is_first = not self._chunks
        self._chunks.append(chunk)
        events: list[JsonObject] = []
        if is_first:
            started = self._response("in_progress")
            events = [
                {"type": f"response.{kind}", "response": started} for kind in ("created", "in_progress")
            ]
        return self._encoded([*events, *self._add(chunk)])

    def end(self) -> bytes:
        events = self._finish()
        last = {"type": f"response.{self._status}", "response": self._response(self._status)}
        return self._encoded([*events, last])

    def error(self, error: ErrorReply) -> bytes:
        if not self._chunks:
            fields = {"code": error.code, "message": error.message, "param": error.param}
            return self._encoded([{"type": "error", **fields}])
        failure = {"code": error.code or error.kind, "message": error.message}
        response = {**self._response("failed"), "error": failure}
        return self._encoded([{"type": "response.failed", "response": response}])

    def _encoded(self, events: Sequence[JsonObject]) -> bytes:
        written = b""
        for event in events:
            numbered = {**event, "sequence_number": self._num_events}
            written += server_sent_event(numbered, kind=event["type"])
            self._num_events += 1
        return written

    @property
    def _status(self) -> str:
        return "incomplete" if self._chunks[-1].finish_reason == "length" else "completed"

    @property
    def _id(self) -> str:
        return f"resp_{self._chunks[0].head.id}"

    def _response(self, status: str) -> JsonObject:
        request = self._request
        text_format = None if request.text is None else request.text.format
        choice = request.tool_choice
        is_incomplete = status == "incomplete"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._chunks[0].head.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "model": request.model,
            "output": [item for item in self._items if item is not None],
            **({} if status == "in_progress" else {"usage": _usage(Usage.of(self._chunks))}),
            "instructions": request.instructions,
            "previous_response_id": None,
            "metadata": request.metadata or {},
            "background": False,
            "store": False,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "tool_choice": choice.as_json() if isinstance(choice, RequestModel) else choice or "auto",
            "tools": [tool.as_json() for tool in request.tools or ()],
            "text": {"format": {"type": "text"} if text_format is None else text_format.as_json()},
            "reasoning": {} if request.reasoning is None else request.reasoning.model_dump(exclude_none=True),
            "max_output_tokens": request.max_output_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "truncation": "disabled",
        }

    # -- items -----------------------------------------------------------------------------------------------------

    def _add(self, chunk: ReplyChunk) -> list[JsonObject]:
        if self._has_logprobs:
            self._logprobs += token_logprobs(chunk, self._template)
        events = self._add_reasoning(chunk.delta.reasoning) if chunk.delta.reasoning else []
        if chunk.delta.content:
            events += self._add_text(chunk.delta.content)
        for call_id, call in chunk.calls.items():
            events += self._add_call(call_id, call)
        return events

    def _add_call(self, call_id: str, call: ToolCall) -> list[JsonObject]:
        """Add a call, which is complete."""
        events = [*self._end_reasoning("completed"), *self._end_message("completed")]
        origin = self._origins.get(call.name) or ToolOrigin(call.name)
        kind, value_name, value = "function_call", "arguments", arguments_text(call)
        delta = "response.function_call_arguments"
        arguments: Mapping[str, Any] | None = None
        if origin.is_custom:
            kind, value_name, delta = "custom_tool_call", "input", "response.custom_tool_call_input"
            text = call.arguments.get(CUSTOM_INPUT) if len(call.arguments) == 1 else None
            value, arguments = (text, None) if isinstance(text, str) else (value, call.arguments)
        self._calls.add(call_id, response_id=self._id, text=value, arguments=arguments)
        opened = self._open("ctc" if origin.is_custom else "fc")
        item = {
            "id": opened.id,
            "type": kind,
            "call_id": call_id,
            "name": origin.name,
            **({} if origin.namespace is None else {"namespace": origin.namespace}),
        }
        where = {"item_id": opened.id, "output_index": opened.index}
        return [
            *events,
            _added(opened, {**item, "status": "in_progress", value_name: ""}),
            {"type": f"{delta}.delta", **where, "delta": value},
            {"type": f"{delta}.done", **where, value_name: value},
            self._done(opened, {**item, "status": "completed", value_name: value}),
        ]

    def _finish(self) -> list[JsonObject]:
        """End the open items. A completion without calls always has a message, which may be empty."""
        has_calls = any(item is not None and "call_id" in item for item in self._items)
        events = self._end_reasoning("completed" if self._message else self._status)
        if not has_calls:
            events += self._add_text("")
        return [*events, *self._end_message(self._status)]

    def _open(self, prefix: str) -> _OpenItem:
        index = len(self._items)
        self._items.append(None)
        return _OpenItem(index, f"{prefix}_{self._chunks[0].head.id}{index:02}")

    def _done(self, opened: _OpenItem, item: JsonObject) -> JsonObject:
        self._items[opened.index] = item
        return {"type": "response.output_item.done", "output_index": opened.index, "item": item}

    # -- reasoning -------------------------------------------------------------------------------------------------

    def _add_reasoning(self, text: str) -> list[JsonObject]:
        events: list[JsonObject] = []
        if self._reasoning is None:
            opened = self._reasoning = self._open("rs")
            events = [
                _added(opened, self._reasoning_item(opened, status="in_progress")),
                self._reasoning_event(opened, "part.added", part=self._reasoning_part("")),
            ]
        self._reasoning.text += text
        return [*events, self._reasoning_event(self._reasoning, "text.delta", delta=text)]

    def _end_reasoning(self, status: str) -> list[JsonObject]:
        opened, self._reasoning = self._reasoning, None
        if opened is None:
            return []
        return [
            self._reasoning_event(opened, "text.done", text=opened.text),
            self._reasoning_event(opened, "part.done", part=self._reasoning_part(opened.text)),
            self._done(opened, self._reasoning_item(opened, status=status)),
        ]

    def _reasoning_item(self, opened: _OpenItem, *, status: str) -> JsonObject:
        request, part = self._request, [self._reasoning_part(opened.text)] if opened.text else []
        item: JsonObject = {"id": opened.id, "type": "reasoning", "status": status, "summary": []}
        if request.has_reasoning_summary:
            item["summary"] = part
        elif part:
            item["content"] = part
        if request.includes("reasoning.encrypted_content") and status != "in_progress":
            item["encrypted_content"] = write_encrypted(opened.text)
        return item

    def _reasoning_part(self, text: str) -> JsonObject:
        is_summary = self._request.has_reasoning_summary
        return {"type": "summary_text" if is_summary else "reasoning_text", "text": text}

    def _reasoning_event(self, opened: _OpenItem, name: str, **fields: Any) -> JsonObject:
        is_summary, is_part = self._request.has_reasoning_summary, name.startswith("part")
        prefix = "reasoning_summary_" if is_summary else "content_" if is_part else "reasoning_"
        return {
            "type": f"response.{prefix}{name}",
            "item_id": opened.id,
            "output_index": opened.index,
            "summary_index" if is_summary else "content_index": 0,
            **fields,
        }

    # -- message ---------------------------------------------------------------------------------------------------

    def _add_text(self, text: str) -> list[JsonObject]:
        events = self._end_reasoning("completed")
        if self._message is None:
            opened = self._message = self._open("msg")
            events += [
                _added(opened, _message_item(opened, status="in_progress", content=[])),
                _part_event("response.content_part.added", opened, part=_text_part("")),
            ]
        if not text:
            return events
        self._message.text += text
        new = self._logprobs[self._num_logprobs_sent :] if self._has_logprobs else []
        self._num_logprobs_sent += len(new)
        delta = _part_event("response.output_text.delta", self._message, delta=text, logprobs=new)
        return [*events, delta]

    def _end_message(self, status: str) -> list[JsonObject]:
        opened, self._message = self._message, None
        if opened is None:
            return []
        logprobs = self._logprobs if self._has_logprobs else []
        part = _text_part(opened.text, **({"logprobs": logprobs} if self._has_logprobs else {}))
        return [
            _part_event("response.output_text.done", opened, text=opened.text, logprobs=logprobs),
            _part_event("response.content_part.done", opened, part=part),
            self._done(opened, _message_item(opened, status=status, content=[part])),
        ]


def _added(opened: _OpenItem, item: JsonObject) -> JsonObject:
    return {"type": "response.output_item.added", "output_index": opened.index, "item": item}


def _message_item(opened: _OpenItem, *, status: str, content: list[JsonObject]) -> JsonObject:
    return {"id": opened.id, "type": "message", "role": "assistant", "status": status, "content": content}


def _text_part(text: str, **more: Any) -> JsonObject:
    return {"type": "output_text", "text": text, "annotations": [], **more}


def _part_event(kind: str, opened: _OpenItem, **fields: Any) -> JsonObject:
    return {"type": kind, "item_id": opened.id, "output_index": opened.index, "content_index": 0, **fields}


def _usage(usage: Usage) -> JsonObject:
    """Return token counts. Tokens of reasoning are part of `output_tokens`, and not counted separately."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }

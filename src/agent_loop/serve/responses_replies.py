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
class _TextItem:
    """Output item whose text grows: the message, or reasoning."""

    index: int
    id: str
    part_event: str
    """Beginning of the types of the events of its only part."""
    text_event: str
    """Beginning of the types of the events of the part's text."""
    part_index: str
    """Name of the index of the part."""
    text: str = ""


class ResponseWriter:
    """Writes one response.

    Reasoning ends when text follows. The message stays open until the first call or the end, so that a turn has one
    message.
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
        self._reasoning: _TextItem | None = None
        self._message: _TextItem | None = None
        self._logprobs: list[JsonObject] = []
        self._num_logprobs_sent = 0
        self._events: list[JsonObject] = []
        """Events that are not written yet."""
        self._num_events = 0

    def whole(self, chunks: Sequence[ReplyChunk]) -> JsonObject:
        self._chunks = list(chunks)
        self._add(ReplyChunk.joined(chunks))
        self._finish()
        return self._response(self._status)

    def chunk(self, chunk: ReplyChunk) -> bytes:
        self._chunks.append(chunk)
        if len(self._chunks) == 1:
            self._emit("response.created", response=self._response("in_progress"))
            self._emit("response.in_progress", response=self._response("in_progress"))
        self._add(chunk)
        return self._written()

    def end(self) -> bytes:
        self._finish()
        self._emit(f"response.{self._status}", response=self._response(self._status))
        return self._written()

    def error(self, error: ErrorReply) -> bytes:
        if self._chunks:
            failure = {"code": error.code or error.kind, "message": error.message}
            self._emit("response.failed", response={**self._response("failed"), "error": failure})
        else:
            self._emit("error", code=error.code, message=error.message, param=error.param)
        return self._written()

    def _emit(self, kind: str, **fields: Any) -> None:
        self._events.append({"type": kind, **fields, "sequence_number": self._num_events})
        self._num_events += 1

    def _written(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(server_sent_event(event, kind=event["type"]) for event in events)

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

    def _add(self, chunk: ReplyChunk) -> None:
        if self._has_logprobs:
            self._logprobs += token_logprobs(chunk, self._template)
        if chunk.delta.reasoning:
            if self._reasoning is None:
                is_summary = self._request.has_reasoning_summary
                names = ("reasoning_summary_part", "reasoning_summary_text", "summary_index")
                self._reasoning = self._begin(
                    "rs", *(names if is_summary else ("content_part", "reasoning_text", "content_index"))
                )
            self._extend(self._reasoning, chunk.delta.reasoning)
        if chunk.delta.content:
            self._add_text(chunk.delta.content)
        for call_id, call in chunk.calls.items():
            self._add_call(call_id, call)

    def _add_text(self, text: str) -> None:
        self._end_reasoning("completed")
        if self._message is None:
            self._message = self._begin("msg", "content_part", "output_text", "content_index")
        if text:
            new = self._logprobs[self._num_logprobs_sent :]
            self._num_logprobs_sent += len(new)
            self._extend(self._message, text, logprobs=new)

    def _add_call(self, call_id: str, call: ToolCall) -> None:
        """Add a call, which is complete."""
        self._end_reasoning("completed")
        self._end_message("completed")
        origin = self._origins.get(call.name) or ToolOrigin(call.name)
        kind, value_name, value = "function_call", "arguments", arguments_text(call)
        delta = "response.function_call_arguments"
        arguments: Mapping[str, Any] | None = None
        if origin.is_custom:
            kind, value_name, delta = "custom_tool_call", "input", "response.custom_tool_call_input"
            text = call.arguments.get(CUSTOM_INPUT) if len(call.arguments) == 1 else None
            value, arguments = (text, None) if isinstance(text, str) else (value, call.arguments)
        self._calls.add(call_id, response_id=self._id, text=value, arguments=arguments)
        index, item_id = self._new_item("ctc" if origin.is_custom else "fc")
        namespace = {} if origin.namespace is None else {"namespace": origin.namespace}
        item = {"id": item_id, "type": kind, "call_id": call_id, "name": origin.name, **namespace}
        self._emit(
            "response.output_item.added",
            output_index=index,
            item={**item, "status": "in_progress", value_name: ""},
        )
        self._emit(f"{delta}.delta", item_id=item_id, output_index=index, delta=value)
        self._emit(f"{delta}.done", item_id=item_id, output_index=index, **{value_name: value})
        self._end(index, {**item, "status": "completed", value_name: value})

    def _finish(self) -> None:
        """End the open items. A completion without calls always has a message, which may be empty."""
        has_calls = any(item is not None and "call_id" in item for item in self._items)
        self._end_reasoning("completed" if self._message else self._status)
        if not has_calls:
            self._add_text("")
        self._end_message(self._status)

    def _end_reasoning(self, status: str) -> None:
        item, self._reasoning = self._reasoning, None
        if item is not None:
            self._end_text(item, self._reasoning_item(item, status=status), part=self._part_of(item))

    def _end_message(self, status: str) -> None:
        item, self._message = self._message, None
        if item is not None:
            logprobs = {"logprobs": self._logprobs} if self._has_logprobs else {}
            part = {**self._part_of(item), **logprobs}
            self._end_text(
                item, _message_item(item, status=status, content=[part]), part=part, logprobs=self._logprobs
            )

    def _new_item(self, prefix: str) -> tuple[int, str]:
        """Return the index and the id of a new item."""
        index = len(self._items)
        self._items.append(None)
        return index, f"{prefix}_{self._chunks[0].head.id}{index:02}"

    def _begin(self, prefix: str, part_event: str, text_event: str, part_index: str) -> _TextItem:
        item = _TextItem(*self._new_item(prefix), part_event, text_event, part_index)
        is_message = text_event == "output_text"
        shown = (
            _message_item(item, status="in_progress", content=[])
            if is_message
            else self._reasoning_item(item, status="in_progress")
        )
        self._emit("response.output_item.added", output_index=item.index, item=shown)
        self._emit(f"response.{part_event}.added", **_place(item), part=self._part_of(item))
        return item

    def _extend(self, item: _TextItem, text: str, **more: Any) -> None:
        item.text += text
        self._emit(f"response.{item.text_event}.delta", **_place(item), delta=text, **more)

    def _end_text(self, item: _TextItem, shown: JsonObject, *, part: JsonObject, **more: Any) -> None:
        self._emit(f"response.{item.text_event}.done", **_place(item), text=item.text, **more)
        self._emit(f"response.{item.part_event}.done", **_place(item), part=part)
        self._end(item.index, shown)

    def _end(self, index: int, item: JsonObject) -> None:
        self._items[index] = item
        self._emit("response.output_item.done", output_index=index, item=item)

    def _part_of(self, item: _TextItem) -> JsonObject:
        if item.text_event == "output_text":
            return {"type": "output_text", "text": item.text, "annotations": []}
        is_summary = self._request.has_reasoning_summary
        return {"type": "summary_text" if is_summary else "reasoning_text", "text": item.text}

    def _reasoning_item(self, item: _TextItem, *, status: str) -> JsonObject:
        parts = [self._part_of(item)] if item.text else []
        is_summary = self._request.has_reasoning_summary
        shown: JsonObject = {
            "id": item.id,
            "type": "reasoning",
            "status": status,
            "summary": parts if is_summary else [],
            **({"content": parts} if parts and not is_summary else {}),
        }
        if self._request.includes("reasoning.encrypted_content") and status != "in_progress":
            shown["encrypted_content"] = write_encrypted(item.text)
        return shown


def _message_item(item: _TextItem, *, status: str, content: list[JsonObject]) -> JsonObject:
    return {"id": item.id, "type": "message", "role": "assistant", "status": status, "content": content}


def _place(item: _TextItem) -> JsonObject:
    return {"item_id": item.id, "output_index": item.index, item.part_index: 0}


def _usage(usage: Usage) -> JsonObject:
    """Return token counts. Tokens of reasoning are part of `output_tokens`, and not counted separately."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }

"""Writes replies of the Responses API, whole or as a stream of events."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from uuid import uuid4

from agent_loop.serve.chat_replies import (
    ChatCompletion,
    ChatCompletionChunk,
    ChoiceLogProbs,
    ErrorResponse,
    FinishReason,
    ResponseToolCall,
    ToolCallFunction,
    Usage,
)
from agent_loop.serve.responses_requests import CallRecord, TranslatedResponse, write_encrypted
from agent_loop.serve.responses_tools import CUSTOM_INPUT

Event: TypeAlias = dict[str, Any]


@dataclass(slots=True)
class _OpenItem:
    """Output item whose text grows."""

    index: int
    id: str
    text: str = ""


class ResponseWriter:
    """Writes one response. Used for one completion, which is either whole or streamed.

    Reasoning ends when text follows. The message stays open until the first call or the end, so that a turn has one
    message. The private methods return the events that they cause.

    Args:
        translated: The request.
        calls: Receives the calls of the response.
    """

    def __init__(self, translated: TranslatedResponse, *, calls: CallRecord) -> None:
        self._request = translated.request
        self._tools = translated.tools
        self._has_logprobs = bool(translated.chat.logprobs)
        self._calls = calls
        self._id = f"resp_{uuid4().hex}"
        self._created_at = int(time.time())
        self._items: list[Event | None] = []
        """Finished items; None for an item that is still open."""
        self._reasoning: _OpenItem | None = None
        self._message: _OpenItem | None = None
        self._logprobs: list[Event] = []
        self._num_logprobs_sent = 0
        self._finish_reason: FinishReason = "stop"
        self._usage: Usage | None = None
        self._num_events = 0
        self._has_started = False

    # -- whole and streamed ----------------------------------------------------------------------------------------

    def whole(self, completion: ChatCompletion) -> Event:
        """Return the response of a whole completion."""
        [choice] = completion.choices
        message = choice.message
        self._add(choice.logprobs, message.reasoning_content, message.content, message.tool_calls)
        self._finish_reason, self._usage = choice.finish_reason, completion.usage
        self._finish()
        return self._response(self._status)

    def chunk(self, chunk: ChatCompletionChunk) -> bytes:
        """Return the events of one chunk."""
        events = [] if self._has_started else self._begin()
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices:
            delta = choice.delta
            events += self._add(choice.logprobs, delta.reasoning_content, delta.content, delta.tool_calls)
            self._finish_reason = choice.finish_reason or self._finish_reason
        return self._encoded(events)

    def end(self) -> bytes:
        """Return the events after the last chunk."""
        events = [] if self._has_started else self._begin()
        events += self._finish()
        last = {"type": f"response.{self._status}", "response": self._response(self._status)}
        return self._encoded([*events, last])

    def error(self, error: ErrorResponse) -> bytes:
        """Return the last event of a failed stream."""
        detail = error.error
        if not self._has_started:
            fields = {"code": detail.code, "message": detail.message, "param": detail.param}
            return self._encoded([{"type": "error", **fields}])
        failure = {"code": detail.code or detail.type, "message": detail.message}
        response = {**self._response("failed"), "error": failure}
        return self._encoded([{"type": "response.failed", "response": response}])

    def _begin(self) -> list[Event]:
        self._has_started = True
        started = self._response("in_progress")
        return [{"type": f"response.{kind}", "response": started} for kind in ("created", "in_progress")]

    def _encoded(self, events: Sequence[Event]) -> bytes:
        written = b""
        for event in events:
            data = json.dumps({**event, "sequence_number": self._num_events})
            written += f"event: {event['type']}\ndata: {data}\n\n".encode()
            self._num_events += 1
        return written

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _response(self, status: str) -> Event:
        request = self._request
        text_format = None if request.text is None else request.text.format
        is_incomplete = status == "incomplete"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "model": request.model,
            "output": [item for item in self._items if item is not None],
            **({} if self._usage is None or status == "in_progress" else {"usage": _usage(self._usage)}),
            "instructions": request.instructions,
            "previous_response_id": None,
            "metadata": request.metadata or {},
            "background": False,
            "store": False,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "text": {"format": text_format or {"type": "text"}},
            "reasoning": {} if request.reasoning is None else request.reasoning.model_dump(exclude_none=True),
            "max_output_tokens": request.max_output_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "truncation": "disabled",
        }

    # -- items -----------------------------------------------------------------------------------------------------

    def _add(
        self,
        logprobs: ChoiceLogProbs | None,
        reasoning: str | None,
        text: str | None,
        calls: Sequence[ResponseToolCall] | None,
    ) -> list[Event]:
        if logprobs is not None:
            self._logprobs += [each.model_dump() for each in logprobs.content or ()]
        events = self._add_reasoning(reasoning) if reasoning else []
        if text:
            events += self._add_text(text)
        for call in calls or ():
            events += self._add_call(call.id, call.function)
        return events

    def _add_call(self, call_id: str, function: ToolCallFunction) -> list[Event]:
        """Add a call, which is complete."""
        events = [*self._end_reasoning("completed"), *self._end_message("completed")]
        origin = self._tools.origin(function.name)
        kind, value_name, value = "function_call", "arguments", function.arguments
        delta = "response.function_call_arguments"
        arguments: dict[str, Any] | None = None
        if origin.is_custom:
            kind, value_name, delta = "custom_tool_call", "input", "response.custom_tool_call_input"
            arguments = json.loads(function.arguments)
            text = arguments.get(CUSTOM_INPUT) if arguments is not None and len(arguments) == 1 else None
            if isinstance(text, str):
                value, arguments = text, None
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

    def _finish(self) -> list[Event]:
        """End the open items. A completion without calls always has a message, which may be empty."""
        has_calls = any(item is not None and "call_id" in item for item in self._items)
        events = self._end_reasoning("completed" if self._message else self._status)
        if not has_calls:
            events += self._add_text("")
        return [*events, *self._end_message(self._status)]

    def _open(self, prefix: str) -> _OpenItem:
        index = len(self._items)
        self._items.append(None)
        return _OpenItem(index, f"{prefix}_{self._id.removeprefix('resp_')}{index:02}")

    def _done(self, opened: _OpenItem, item: Event) -> Event:
        self._items[opened.index] = item
        return {"type": "response.output_item.done", "output_index": opened.index, "item": item}

    # -- reasoning -------------------------------------------------------------------------------------------------

    def _add_reasoning(self, text: str) -> list[Event]:
        events: list[Event] = []
        if self._reasoning is None:
            opened = self._reasoning = self._open("rs")
            events = [
                _added(opened, self._reasoning_item(opened, status="in_progress")),
                self._reasoning_event(opened, "part.added", part=self._reasoning_part("")),
            ]
        self._reasoning.text += text
        return [*events, self._reasoning_event(self._reasoning, "text.delta", delta=text)]

    def _end_reasoning(self, status: str) -> list[Event]:
        opened, self._reasoning = self._reasoning, None
        if opened is None:
            return []
        return [
            self._reasoning_event(opened, "text.done", text=opened.text),
            self._reasoning_event(opened, "part.done", part=self._reasoning_part(opened.text)),
            self._done(opened, self._reasoning_item(opened, status=status)),
        ]

    def _reasoning_item(self, opened: _OpenItem, *, status: str) -> Event:
        request, part = self._request, [self._reasoning_part(opened.text)] if opened.text else []
        item: Event = {"id": opened.id, "type": "reasoning", "status": status, "summary": []}
        if request.has_reasoning_summary:
            item["summary"] = part
        elif part:
            item["content"] = part
        if request.includes("reasoning.encrypted_content") and status != "in_progress":
            item["encrypted_content"] = write_encrypted(opened.text)
        return item

    def _reasoning_part(self, text: str) -> Event:
        is_summary = self._request.has_reasoning_summary
        return {"type": "summary_text" if is_summary else "reasoning_text", "text": text}

    def _reasoning_event(self, opened: _OpenItem, name: str, **fields: Any) -> Event:
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

    def _add_text(self, text: str) -> list[Event]:
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

    def _end_message(self, status: str) -> list[Event]:
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


def _added(opened: _OpenItem, item: Event) -> Event:
    return {"type": "response.output_item.added", "output_index": opened.index, "item": item}


def _message_item(opened: _OpenItem, *, status: str, content: list[Event]) -> Event:
    return {"id": opened.id, "type": "message", "role": "assistant", "status": status, "content": content}


def _text_part(text: str, **more: Any) -> Event:
    return {"type": "output_text", "text": text, "annotations": [], **more}


def _part_event(kind: str, opened: _OpenItem, **fields: Any) -> Event:
    return {"type": kind, "item_id": opened.id, "output_index": opened.index, "content_index": 0, **fields}


def _usage(usage: Usage) -> Event:
    """Return token counts. Tokens of reasoning are part of `output_tokens`, and not counted separately."""
    details = usage.prompt_tokens_details
    cached = 0 if details is None else details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }

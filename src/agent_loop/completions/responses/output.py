"""Builds the output items of a response from a completion, and the events of the stream on the way."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_loop.completions.response_models import TokenLogProb, ToolCallFunction
from agent_loop.completions.responses.encrypted import write_encrypted
from agent_loop.completions.responses.response_models import (
    CustomToolCall,
    FunctionCall,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    SummaryText,
)
from agent_loop.completions.responses.tools import CUSTOM_INPUT, Tools

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How a response is written."""

    response_id: str
    tools: Tools
    has_reasoning_summary: bool = False
    has_encrypted_reasoning: bool = False
    has_logprobs: bool = False

    def item_id(self, prefix: str, index: int) -> str:
        """Return the id of an output item."""
        return f"{prefix}_{self.response_id.removeprefix('resp_')}{index:02}"


@dataclass(slots=True)
class _OpenItem:
    """Output item whose text grows."""

    index: int
    id: str
    texts: list[str] = field(default_factory=list[str])
    logprobs: list[TokenLogProb] = field(default_factory=list[TokenLogProb])
    num_logprobs_sent: int = 0

    @property
    def text(self) -> str:
        return "".join(self.texts)


class OutputBuilder:
    """Builds the output items of one response.

    Reasoning ends when text follows. The message stays open until the first call or the end, so that a turn has one
    message. Each method returns the events that it causes; the events have no sequence numbers.
    """

    def __init__(self, options: OutputOptions) -> None:
        self._options = options
        self._items: list[OutputItem | None] = []
        """Finished items; None for an item that is still open."""
        self._reasoning: _OpenItem | None = None
        self._message: _OpenItem | None = None
        self._logprobs: list[TokenLogProb] = []
        self._arguments: dict[str, Mapping[str, Any]] = {}

    @property
    def items(self) -> list[OutputItem]:
        """Finished items."""
        return [item for item in self._items if item is not None]

    @property
    def custom_arguments(self) -> Mapping[str, Mapping[str, Any]]:
        """Arguments of calls of custom tools, by call id, as far as they are not the text alone."""
        return self._arguments

    def add_logprobs(self, logprobs: Sequence[TokenLogProb]) -> None:
        """Add log-probs, which go out with the next text."""
        self._logprobs += logprobs

    def add_reasoning(self, text: str) -> list[Event]:
        """Add a piece of reasoning."""
        events: list[Event] = []
        if self._reasoning is None:
            self._reasoning = self._open("rs")
            events += self._begin(
                self._reasoning, self._reasoning_item(self._reasoning, status="in_progress")
            )
            events.append(self._reasoning_event("part.added", part=self._reasoning_part("")))
        self._reasoning.texts.append(text)
        return [*events, self._reasoning_event("text.delta", delta=text)]

    def add_text(self, text: str) -> list[Event]:
        """Add a piece of the message."""
        events = self._end_reasoning("completed")
        if self._message is None:
            self._message = self._open("msg")
            item = OutputMessage(id=self._message.id, status="in_progress", content=[])
            part = self._text_part("", None)
            events += self._begin(self._message, item)
            events.append(self._part_event("response.content_part.added", self._message, part=part))
        if not text:
            return events
        self._message.texts.append(text)
        new = self._logprobs[self._message.num_logprobs_sent :] if self._options.has_logprobs else []
        self._message.num_logprobs_sent += len(new)
        logprobs = [each.model_dump() for each in new]
        return [
            *events,
            self._part_event("response.output_text.delta", self._message, delta=text, logprobs=logprobs),
        ]

    def add_call(self, call_id: str, function: ToolCallFunction) -> list[Event]:
        """Add a call, which is complete."""
        events = [*self._end_reasoning("completed"), *self._end_message("completed")]
        origin = self._options.tools.origin(function.name)
        opened = self._open("ctc" if origin.is_custom else "fc")
        given: dict[str, Any] = {
            "id": opened.id,
            "call_id": call_id,
            "name": origin.name,
            "namespace": origin.namespace,
        }
        if origin.is_custom:
            kind, name, value = (
                "response.custom_tool_call_input",
                "input",
                self._custom_input(call_id, function),
            )
            item: OutputItem = CustomToolCall(status="completed", input=value, **given)
            started: OutputItem = CustomToolCall(status="in_progress", input="", **given)
        else:
            kind, name, value = "response.function_call_arguments", "arguments", function.arguments
            item = FunctionCall(status="completed", arguments=value, **given)
            started = FunctionCall(status="in_progress", arguments="", **given)
        where = {"item_id": opened.id, "output_index": opened.index}
        return [
            *events,
            *self._begin(opened, started),
            {"type": f"{kind}.delta", **where, "delta": value},
            {"type": f"{kind}.done", **where, name: value},
            *self._finish(opened, item),
        ]

    def finish(self, *, is_complete: bool) -> list[Event]:
        """End the open items. A completion without calls always has a message, which may be empty."""
        status: ItemStatus = "completed" if is_complete else "incomplete"
        has_calls = any(isinstance(item, FunctionCall | CustomToolCall) for item in self._items)
        events = self._end_reasoning("completed" if self._message or is_complete else status)
        if not has_calls:
            events += self.add_text("")
        return [*events, *self._end_message(status)]

    # -- reasoning -------------------------------------------------------------------------------------------------

    def _end_reasoning(self, status: ItemStatus) -> list[Event]:
        opened = self._reasoning
        if opened is None:
            return []
        events = [
            self._reasoning_event("text.done", text=opened.text),
            self._reasoning_event("part.done", part=self._reasoning_part(opened.text)),
        ]
        self._reasoning = None
        return [*events, *self._finish(opened, self._reasoning_item(opened, status=status))]

    def _reasoning_item(self, opened: _OpenItem, *, status: ItemStatus) -> ReasoningItem:
        text, is_summary = opened.text, self._options.has_reasoning_summary
        hides = self._options.has_encrypted_reasoning and status != "in_progress"
        return ReasoningItem(
            id=opened.id,
            status=status,
            summary=[SummaryText(text=text)] if text and is_summary else [],
            content=[ReasoningText(text=text)] if text and not is_summary else None,
            encrypted_content=write_encrypted(text) if hides else None,
        )

    def _reasoning_part(self, text: str) -> dict[str, Any]:
        part = SummaryText(text=text) if self._options.has_reasoning_summary else ReasoningText(text=text)
        return part.model_dump()

    def _reasoning_event(self, name: str, **fields: Any) -> Event:
        assert self._reasoning is not None
        is_summary, is_part = self._options.has_reasoning_summary, name.startswith("part")
        prefix = "reasoning_summary_" if is_summary else "content_" if is_part else "reasoning_"
        return {
            "type": f"response.{prefix}{name}",
            "item_id": self._reasoning.id,
            "output_index": self._reasoning.index,
            "summary_index" if is_summary else "content_index": 0,
            **fields,
        }

    # -- message ---------------------------------------------------------------------------------------------------

    def _end_message(self, status: ItemStatus) -> list[Event]:
        opened = self._message
        if opened is None:
            return []
        self._message = None
        logprobs = self._logprobs if self._options.has_logprobs else None
        part = self._text_part(opened.text, logprobs)
        shown = [each.model_dump() for each in logprobs or ()]
        item = OutputMessage(id=opened.id, status=status, content=[part])
        return [
            self._part_event("response.output_text.done", opened, text=opened.text, logprobs=shown),
            self._part_event("response.content_part.done", opened, part=part),
            *self._finish(opened, item),
        ]

    def _text_part(self, text: str, logprobs: list[TokenLogProb] | None) -> OutputText:
        return OutputText(text=text, logprobs=logprobs)

    def _part_event(self, kind: str, opened: _OpenItem, **fields: Any) -> Event:
        shown = {
            name: value.model_dump() if isinstance(value, OutputText) else value
            for name, value in fields.items()
        }
        return {"type": kind, "item_id": opened.id, "output_index": opened.index, "content_index": 0, **shown}

    # -- items -----------------------------------------------------------------------------------------------------

    def _custom_input(self, call_id: str, function: ToolCallFunction) -> str:
        """Return the text of a call. Other arguments than a text become a text as JSON."""
        arguments: dict[str, Any] = json.loads(function.arguments)
        text = arguments.get(CUSTOM_INPUT)
        if len(arguments) == 1 and isinstance(text, str):
            return text
        self._arguments[call_id] = arguments
        return function.arguments

    def _open(self, prefix: str) -> _OpenItem:
        index = len(self._items)
        self._items.append(None)
        return _OpenItem(index, self._options.item_id(prefix, index))

    def _begin(self, opened: _OpenItem, item: OutputItem) -> list[Event]:
        return [_item_event("response.output_item.added", opened, item)]

    def _finish(self, opened: _OpenItem, item: OutputItem) -> list[Event]:
        self._items[opened.index] = item
        return [_item_event("response.output_item.done", opened, item)]


def _item_event(kind: str, opened: _OpenItem, item: OutputItem) -> Event:
    return {"type": kind, "output_index": opened.index, "item": item.model_dump()}

"""Input items as messages of a chat request.

A turn of the model is several items: reasoning, a message, calls. They are one assistant message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from agent_loop.completions.responses.calls import CallRecord
from agent_loop.completions.responses.items import (
    AssistantItem,
    CallOutput,
    CustomCallInput,
    FunctionCallInput,
    Item,
    MessageItem,
    ReasoningInput,
    assistant_text,
    call_arguments,
    content_of,
    reasoning_text,
)
from agent_loop.completions.responses.tools import CUSTOM_INPUT, chat_name

_CallItem: TypeAlias = FunctionCallInput | CustomCallInput
_ModelItem: TypeAlias = AssistantItem | ReasoningInput | FunctionCallInput | CustomCallInput
MODEL_ITEMS = (AssistantItem, ReasoningInput, FunctionCallInput, CustomCallInput)


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """Item with its place in the request, for error messages."""

    item: Item
    where: str


def messages_of(items: Sequence[PlacedItem], *, known: CallRecord) -> list[dict[str, Any]]:
    """Return the messages of a chat request.

    Raises:
        RequestError: The content of an item is not supported.
    """
    messages: list[dict[str, Any] | _Turn] = []
    turn: _Turn | None = None
    is_open = False
    for position, placed in enumerate(items):
        item = placed.item
        if isinstance(item, MODEL_ITEMS):
            if turn is not None and turn.has_later_call(item, is_open=is_open, known=known):
                pass  # the client wrote the result of each call right after the call
            elif turn is None or not is_open or turn.ends_before(item, items[position + 1 :]):
                turn, is_open = _Turn(), True
                messages.append(turn)
            turn.add(item, where=placed.where, known=known)
        else:
            is_open = False
            if not isinstance(item, CallOutput):
                turn = None
            messages.append(_message(item, where=placed.where))
    return [message.message() if isinstance(message, _Turn) else message for message in messages]


@dataclass(slots=True)
class _Turn:
    """Turn of the model while its items are read."""

    texts: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def ends_before(self, item: _ModelItem, following: Sequence[PlacedItem]) -> bool:
        """Return whether an item belongs to the next turn, because this turn has a message already."""
        if isinstance(item, AssistantItem):
            return bool(self.texts)
        if not isinstance(item, ReasoningInput) or not (self.texts or self.calls):
            return False
        after = next((each.item for each in following if not isinstance(each.item, ReasoningInput)), None)
        return isinstance(after, AssistantItem)

    def has_later_call(self, item: _ModelItem, *, is_open: bool, known: CallRecord) -> bool:
        """Return whether an item that follows results of this turn's calls is another call of this turn."""
        if is_open or not isinstance(item, FunctionCallInput | CustomCallInput) or not self.calls:
            return False
        ids = [str(call["id"]) for call in self.calls]
        return item.call_id not in ids and known.are_of_one_turn([*ids, item.call_id])

    def add(self, item: _ModelItem, *, where: str, known: CallRecord) -> None:
        if isinstance(item, AssistantItem):
            self.texts.append(assistant_text(item.content, where=f"{where}.content"))
        elif isinstance(item, ReasoningInput):
            self.reasoning.append(reasoning_text(item, where=where))
        else:
            function = {
                "name": chat_name(item.name, item.namespace),
                "arguments": _arguments(item, where, known),
            }
            self.calls.append({"type": "function", "id": item.call_id, "function": function})

    def message(self) -> dict[str, Any]:
        return assistant_message("".join(self.texts), reasoning="".join(self.reasoning), calls=self.calls)


def assistant_message(text: str, *, reasoning: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return an assistant's message of a chat request."""
    return {
        "role": "assistant",
        "content": text,
        **({"reasoning_content": reasoning} if reasoning else {}),
        **({"tool_calls": list(calls)} if calls else {}),
    }


def _arguments(item: _CallItem, where: str, known: CallRecord) -> Mapping[str, Any]:
    if isinstance(item, FunctionCallInput):
        return call_arguments(item, where=where)
    sampled = known.custom_arguments(item.call_id, item.input)
    return {CUSTOM_INPUT: item.input} if sampled is None else sampled


def _message(item: Item, *, where: str) -> dict[str, Any]:
    if isinstance(item, CallOutput):
        content = content_of(item.output, where=f"{where}.output")
        return {"role": "tool", "tool_call_id": item.call_id, "content": content}
    assert isinstance(item, MessageItem)  # references are replaced by the items that they name
    return {"role": item.role, "content": content_of(item.content, where=f"{where}.content")}

"""Placeholder for the conversation before a reply: the turns that a template needs in order to render the reply."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, takewhile
from typing import Any, NamedTuple

from agent_loop.chat.rendering import SENTINEL
from agent_loop.types import Message, ToolCall

PARAMETER = "value"
"""The only argument of a placeholder call."""

SCHEMA: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "placeholder",
        "description": "-",
        "parameters": {"type": "object", "properties": {PARAMETER: {"type": "string", "description": "-"}}},
    },
}


class CallKey(NamedTuple):
    """Name and id by which a tool message refers to the call that it answers."""

    name: str
    id: str


@dataclass(frozen=True, slots=True)
class PlaceholderTurns:
    """One choice of placeholder turns. The sentinel is the assistant's last text in them."""

    has_calls: bool = False
    """The assistant calls a tool with the sentinel as the argument. Otherwise the sentinel is its text."""
    calls_each: bool = True
    """One call per tool message. Otherwise one call for all, for templates that refuse parallel calls."""
    has_text: bool = True
    """A message with calls has an empty text. Otherwise it has no text."""
    arguments_as_json: bool = False
    """Arguments are a JSON string. Otherwise they are a mapping."""
    fills_in: bool = False
    """Tool messages without a name or an id get one, for templates that demand both."""
    has_system: bool = False
    has_schema: bool = False

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return (SCHEMA,) if self.has_schema else ()

    def messages(self, answered: Sequence[CallKey]) -> list[Message]:
        """Return the messages before replies to these calls; the assistant's message is the last."""
        messages: list[Message] = [{"role": "system", "content": "-"}] if self.has_system else []
        messages.append({"role": "user", "content": "-"})
        if not self.has_calls:
            return [*messages, {"role": "assistant", "content": SENTINEL}]
        kept = answered if self.calls_each else answered[-1:]
        calls = [ToolCall(call.name, {PARAMETER: SENTINEL}, id=call.id) for call in kept]
        return [*messages, self._message(calls)]

    def filled(self, replies: Sequence[Message], answered: Sequence[CallKey]) -> list[Message]:
        """Return the replies, with names and ids where the template demands them."""
        if not self.fills_in:
            return list(replies)
        filled = [
            {**reply, "name": call.name, "tool_call_id": call.id}
            for reply, call in zip(tool_replies(replies), answered, strict=False)
        ]
        return [*filled, *replies[len(filled) :]]

    def answered(self, replies: Sequence[Message], *, calls: Sequence[ToolCall] = ()) -> list[CallKey]:
        """Return the call that each leading tool message answers.

        Args:
            replies: The new messages.
            calls: The calls of the assistant, for replies that do not name their call.
        """
        if not self.has_calls:
            return []
        leading = list(tool_replies(replies))
        known = calls if len(calls) == len(leading) else [ToolCall("", {})] * len(leading)
        return [
            CallKey(
                str(reply.get("name") or call.name or "tool"),
                str(reply.get("tool_call_id") or call.id or _generated_id(i)),
            )
            for i, (reply, call) in enumerate(zip(leading, known, strict=True))
        ]

    def adapted(self, message: Message) -> Message:
        """Return an assistant message whose calls have the form that the template accepts."""
        calls = message.get("tool_calls")
        if not calls:
            return message
        accepted = [
            ToolCall(c["function"]["name"], c["function"]["arguments"], id=c.get("id") or _generated_id(i))
            for i, c in enumerate(calls)
        ]
        return {
            **message,
            **self._message(accepted),
            "content": message.get("content") or ("" if self.has_text else None),
        }

    def _message(self, calls: Sequence[ToolCall]) -> Message:
        messages = [call.as_message() for call in calls]
        if self.arguments_as_json:
            for message in messages:
                arguments = message["function"]["arguments"]
                if not isinstance(arguments, str):
                    message["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
        content: Message = {"content": ""} if self.has_text else {}
        return {"role": "assistant", **content, "tool_calls": messages}


def tool_replies(replies: Sequence[Message]) -> Iterator[Message]:
    """Yield the tool messages with which the replies begin."""
    return takewhile(lambda reply: reply.get("role") == "tool", replies)


def candidates(*, for_tools: bool) -> Iterator[PlaceholderTurns]:
    """Yield the placeholders to try for tool replies or for other replies, the simplest first."""
    with_system_and_schema = list(product((False, True), repeat=2))
    if for_tools:
        for (has_system, has_schema), as_json, has_text, calls_each in product(
            with_system_and_schema, (False, True), (True, False), (True, False)
        ):
            yield PlaceholderTurns(
                has_calls=True,
                calls_each=calls_each,
                has_text=has_text,
                arguments_as_json=as_json,
                has_system=has_system,
                has_schema=has_schema,
            )
    for has_system, has_schema in with_system_and_schema:
        yield PlaceholderTurns(has_system=has_system, has_schema=has_schema)


def with_generated_ids(answered: Sequence[CallKey]) -> list[CallKey]:
    """Return the same calls with ids that every template accepts."""
    return [CallKey(call.name, _generated_id(i)) for i, call in enumerate(answered)]


def _generated_id(number: int) -> str:
    """Return an id of nine letters and digits, which even the strictest template accepts."""
    return f"call{number:05d}"

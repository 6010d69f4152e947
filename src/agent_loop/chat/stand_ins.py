"""What is rendered in the place of the conversation so far, so that a template writes a reply as it should."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, takewhile
from typing import Any, NamedTuple

from agent_loop.chat.rendering import SENTINEL
from agent_loop.types import Message, ToolCall

PARAMETER = "value"
"""The one argument of a stand-in's calls."""

SCHEMA: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "stand_in",
        "description": "-",
        "parameters": {"type": "object", "properties": {PARAMETER: {"type": "string", "description": "-"}}},
    },
}


class CallKey(NamedTuple):
    """What a tool message says of the call that it answers."""

    name: str
    id: str


@dataclass(frozen=True, slots=True)
class StandIn:
    """One way to stand for the turns before a reply. The sentinel is the last thing the assistant says in it."""

    has_calls: bool = False
    """The assistant calls a tool, with the sentinel as the argument; else the sentinel is its text."""
    calls_each: bool = True
    """One call per tool message; else one for all, where a template allows no parallel calls."""
    has_text: bool = True
    """With calls: an empty text beside them; else none at all."""
    arguments_as_json: bool = False
    """Arguments are a JSON string; else a mapping."""
    fills_in: bool = False
    """Tool messages that lack a name or an id get one, where a template demands it."""
    has_system: bool = False
    has_schema: bool = False

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return (SCHEMA,) if self.has_schema else ()

    def turns(self, answered: Sequence[CallKey]) -> list[Message]:
        """The turns before replies to these calls, the assistant's last."""
        turns: list[Message] = [{"role": "system", "content": "-"}] if self.has_system else []
        turns.append({"role": "user", "content": "-"})
        if not self.has_calls:
            return [*turns, {"role": "assistant", "content": SENTINEL}]
        kept = answered if self.calls_each else answered[-1:]
        calls = [ToolCall(call.name, {PARAMETER: SENTINEL}, id=call.id) for call in kept]
        return [*turns, self._message(calls)]

    def filled(self, replies: Sequence[Message], answered: Sequence[CallKey]) -> list[Message]:
        """The replies as the template is to see them."""
        if not self.fills_in:
            return list(replies)
        filled = [
            {**reply, "name": call.name, "tool_call_id": call.id}
            for reply, call in zip(tool_replies(replies), answered, strict=False)
        ]
        return [*filled, *replies[len(filled) :]]

    def answered(self, replies: Sequence[Message], *, calls: Sequence[ToolCall] = ()) -> list[CallKey]:
        """The call that each leading tool message answers.

        Args:
            replies: The new messages.
            calls: The calls that were made, for replies that do not name them.
        """
        if not self.has_calls:
            return []
        leading = list(tool_replies(replies))
        known = calls if len(calls) == len(leading) else [ToolCall("", {})] * len(leading)
        return [
            CallKey(
                str(reply.get("name") or call.name or "tool"),
                str(reply.get("tool_call_id") or call.id or _made_up_id(i)),
            )
            for i, (reply, call) in enumerate(zip(leading, known, strict=True))
        ]

    def written(self, message: Message) -> Message:
        """An assistant message with calls, in the form that the template reads."""
        calls = message.get("tool_calls")
        if not calls:
            return message
        read = [
            ToolCall(c["function"]["name"], c["function"]["arguments"], id=c.get("id") or _made_up_id(i))
            for i, c in enumerate(calls)
        ]
        return {
            **message,
            **self._message(read),
            "content": message.get("content") or ("" if self.has_text else None),
        }

    def _message(self, calls: Sequence[ToolCall]) -> Message:
        messages = [call.as_message() for call in calls]
        if self.arguments_as_json:
            for message in messages:
                arguments = message["function"]["arguments"]
                message["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
        content: Message = {"content": ""} if self.has_text else {}
        return {"role": "assistant", **content, "tool_calls": messages}


def tool_replies(replies: Sequence[Message]) -> Iterator[Message]:
    """The tool messages with which the replies begin."""
    return takewhile(lambda reply: reply.get("role") == "tool", replies)


def candidates(*, for_tools: bool) -> Iterator[StandIn]:
    """Stand-ins for tool replies or for other replies, the plainest first."""
    surroundings = list(product((False, True), repeat=2))
    if for_tools:
        for (has_system, has_schema), as_json, has_text, calls_each in product(
            surroundings, (False, True), (True, False), (True, False)
        ):
            yield StandIn(
                has_calls=True,
                calls_each=calls_each,
                has_text=has_text,
                arguments_as_json=as_json,
                has_system=has_system,
                has_schema=has_schema,
            )
    for has_system, has_schema in surroundings:
        yield StandIn(has_system=has_system, has_schema=has_schema)


def with_made_up_ids(answered: Sequence[CallKey]) -> list[CallKey]:
    """The same calls under ids that every template takes."""
    return [CallKey(call.name, _made_up_id(i)) for i, call in enumerate(answered)]


def _made_up_id(number: int) -> str:
    """Nine letters and digits, which even the strictest template takes."""
    return f"call{number:05d}"

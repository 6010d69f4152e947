"""Short conversations on which a chat template is tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_loop.types import Message, ToolCall

TOOL_NAME = "get_weather"
CITY = "Lisbon"
REASONING = "I recall that this was asked before."

PROBE_TOOLS: Sequence[Mapping[str, Any]] = (
    {
        "type": "function",
        "function": {
            "name": TOOL_NAME,
            "description": "Gives the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Its name."}},
                "required": ["city"],
            },
        },
    },
)

_SYSTEM: Message = {"role": "system", "content": "Answer briefly."}
_USER: Message = {"role": "user", "content": f"How is the weather in {CITY}?"}
_ANSWER: Message = {"role": "assistant", "content": "Sunny."}
_NEXT: Message = {"role": "user", "content": "And tomorrow?"}
_UNICODE = "¿Qué tal? 你好, 🌦️ e\u0301\n\n  <b>&amp;</b> \\n {{ x }}"


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt, one assistant turn, and what follows it."""

    name: str
    opening: Sequence[Message]
    said: Message
    """The assistant turn."""
    replies: Sequence[Message]
    has_tools: bool = False
    is_essential: bool = False
    """A template that refuses it is refused; one that refuses another probe has a limit."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return PROBE_TOOLS if self.has_tools else ()

    @property
    def calls(self) -> list[ToolCall]:
        return [
            ToolCall(call["function"]["name"], call["function"]["arguments"], id=call["id"])
            for call in self.said.get("tool_calls", ())
        ]


def plain_probes(control_text: str) -> list[Probe]:
    """Conversations without tools.

    Args:
        control_text: A text that holds control tokens.
    """
    thinking = {**_ANSWER, "reasoning_content": REASONING}
    return [
        Probe("user follow-up", [_USER], _ANSWER, [_NEXT], is_essential=True),
        Probe("system prompt", [_SYSTEM, _USER], _ANSWER, [_NEXT]),
        Probe("third turn", [_USER, _ANSWER, _NEXT], _ANSWER, [_NEXT]),
        Probe("thinking", [_USER], thinking, [_NEXT]),
        Probe("empty text", [_USER], {**_ANSWER, "content": ""}, [_NEXT]),
        Probe("unicode", [_USER], _ANSWER, [{**_NEXT, "content": _UNICODE}]),
        Probe("control tokens", [_USER], _ANSWER, [{**_NEXT, "content": control_text}]),
    ]


def tool_probes(control_text: str) -> list[Probe]:
    """Conversations with tools."""
    call, reply = _calls(1), _reply(1, "21 °C, sunny")
    thinking = {**call, "reasoning_content": REASONING}
    error = _reply(1, 'Error: "city" is unknown;\ngive one of {"Lisbon", "Oslo"}')

    def probe(name: str, said: Message, replies: Sequence[Message], *opening: Message) -> Probe:
        return Probe(name, opening or [_USER], said, replies, has_tools=True, is_essential=name == "tool")

    return [
        probe("tool", call, [reply]),
        probe("parallel tools", _calls(2), [reply, _reply(2, "22 °C")]),
        probe("tool error", call, [error]),
        probe("system prompt and tool", call, [reply], _SYSTEM, _USER),
        probe("second tool turn", _calls(1, first=2), [_reply(2, "22 °C")], _USER, call, reply),
        probe("follow-up after tool", _ANSWER, [_NEXT], _USER, call, reply),
        probe("follow-up with tools", _ANSWER, [_NEXT]),
        probe("thinking and tool", thinking, [reply]),
        probe("empty tool reply", call, [_reply(1, "")]),
        probe("unicode tool reply", call, [_reply(1, _UNICODE)]),
        probe("control tokens in tool reply", call, [_reply(1, control_text)]),
    ]


def _calls(count: int, *, first: int = 1) -> Message:
    numbers = range(first, first + count)
    calls = [ToolCall(TOOL_NAME, {"city": CITY}, id=_id(number)).as_message() for number in numbers]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _reply(number: int, text: str) -> Message:
    return {"role": "tool", "name": TOOL_NAME, "tool_call_id": _id(number), "content": text}


def _id(number: int) -> str:
    return f"probe{number:04d}"

"""Short conversations on which a chat template is checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from agent_loop.chat.report import Cause
from agent_loop.types import Message, ToolCall

TOOL_NAME = "get_weather"


def _schema(name: str, description: str, **parameters: str) -> Mapping[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": [*properties]},
        },
    }


PROBE_TOOLS: Sequence[Mapping[str, Any]] = (
    _schema(TOOL_NAME, "Gives the weather of a city.", city="Name of the city."),
    _schema("get_tides", "Gives the tides of a port.", port="Name of the port."),
)

_TEXTS: Mapping[str, Sequence[str]] = {
    "system": ("Answer briefly.",),
    "user": ("How is the weather?", "And tomorrow?", "And by the sea?", "And in the hills?", "And at night?"),
    "answer": ("Sunny.", "Cloudy.", "Windy.", "Foggy."),
    "text": ("I will look it up.", "Let me check once more.", "One last look."),
    "thinking": ("I recall that this was asked.", "It may have changed.", "It is a new day.", "Now I know."),
    "call": ("Lisbon", "Oslo", "Quito", "Hanoi", "Tunis", "Perth"),
    "reply": ("21 degrees", "5 degrees", "30 degrees", "9 degrees", "17 degrees", "8 degrees"),
}
_ROLES = {"system": "system", "user": "user", "reply": "tool"}
"""Roles of the messages that are not the assistant's."""
_ERROR = 'Error: "city" is unknown;\ngive one of {"Paris", "Rome"}'
_UNICODE = "¿Qué tal? 你好, 🌦️ e\u0301\n\n  <b>&amp;</b> \\n {{ x }}"


SCHEMA_TEXTS = tuple(
    (Cause.IGNORED_TOOLS, text)
    for tool in PROBE_TOOLS
    for text in (
        tool["function"]["description"],
        *(parameter["description"] for parameter in tool["function"]["parameters"]["properties"].values()),
    )
)
"""Texts of the tools' schemas, which occur nowhere else."""


@dataclass(frozen=True, slots=True)
class ProbeTurn:
    """Assistant turn of a probe, with the messages before and after it."""

    opening: Sequence[Message]
    said: Message
    """The assistant's message."""
    replies: Sequence[Message]
    """Messages up to the next assistant turn."""

    @property
    def calls(self) -> list[ToolCall]:
        return [
            ToolCall(call["function"]["name"], call["function"]["arguments"], id=call["id"])
            for call in self.said.get("tool_calls", ())
        ]


@dataclass(frozen=True, slots=True)
class Probe:
    """Conversation whose assistant turns are checked one by one."""

    name: str
    messages: Sequence[Message]
    has_tools: bool = False
    is_essential: bool = False
    """Whether a template that refuses the conversation is unsupported. Refusing other probes is a limit."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return PROBE_TOOLS if self.has_tools else ()

    @property
    def has_reasoning(self) -> bool:
        return any("reasoning_content" in message for message in self.messages)

    @property
    def turns(self) -> Iterator[ProbeTurn]:
        roles = [message["role"] for message in self.messages]
        starts = [i for i, role in enumerate(roles) if role == "assistant"]
        for start, end in zip(starts, [*starts[1:], len(roles)], strict=True):
            yield ProbeTurn(self.messages[:start], self.messages[start], self.messages[start + 1 : end])


def plain_probes(control_text: str) -> list[Probe]:
    """Return conversations without tools."""
    ask = _TEXTS["user"][0]
    return [
        _probe("user follow-up", "user answer user", is_essential=True),
        _probe("system prompt", "system user answer user answer user"),
        _probe("third turn", "user answer user answer user"),
        _probe("two user messages", "user answer user user answer user"),
        _probe("thinking", "user thinking+answer user"),
        _probe(
            "thinking in some turns",
            "user thinking+answer user thinking+answer user answer user thinking+answer user",
        ),
        _probe("thinking and system prompt", "system user thinking+answer user thinking+answer user"),
        _probe("empty text", "user answer user answer user", answer=("", "Sunny.")),
        _probe("empty user message", "user answer user answer user", user=(ask, "", "And then?")),
        _probe("unicode", "user answer user", user=(ask, _UNICODE), answer=(_UNICODE,)),
        _probe("control tokens", "user answer user", user=(ask, control_text)),
    ]


def tool_probes(control_text: str) -> list[Probe]:
    """Return conversations with tools."""

    def probe(name: str, plan: str, *, is_essential: bool = False, **texts: Sequence[str]) -> Probe:
        return _probe(name, plan, has_tools=True, is_essential=is_essential, **texts)

    return [
        probe("tool", "user call reply", is_essential=True),
        probe("parallel tools", "user call+call reply reply"),
        probe("tool error", "user call reply", reply=(_ERROR,)),
        probe("system prompt and tool", "system user call reply answer user call reply"),
        probe("second tool turn", "user call reply call reply"),
        probe("parallel tools in each turn", "user call+call reply reply call+call reply reply answer user"),
        probe("follow-up after tool", "user call reply answer user call reply answer user"),
        probe("follow-up with tools", "user answer user call reply"),
        probe("user behind tool reply", "user call reply user answer user"),
        probe("tool without reply", "user call user answer user"),
        probe("text and tool", "user text+call reply"),
        probe("text and tool, then answer", "user text+call reply answer user"),
        probe("text and tool, then user", "user text+call reply user answer user"),
        probe("text and tool without reply", "user text+call user answer user"),
        probe(
            "text and tool in each turn", "user text+call reply text+call reply answer user text+call reply"
        ),
        probe("text and parallel tools", "user text+call+call reply reply answer user"),
        probe("thinking with tools", "user thinking+answer user thinking+answer user"),
        probe("thinking and tool", "user thinking+call reply"),
        probe("thinking and tool, then answer", "user thinking+call reply thinking+answer user"),
        probe("thinking and tool, then user", "user thinking+call reply user thinking+answer user"),
        probe("thinking and parallel tools", "user thinking+call+call reply reply answer user"),
        probe(
            "thinking in each tool turn",
            "system user thinking+call reply thinking+call reply answer user thinking+call reply answer user",
        ),
        probe("thinking, text and tool", "user thinking+text+call reply thinking+answer user"),
        probe("empty tool reply", "user call reply call reply", reply=("", "5 degrees")),
        probe("unicode tool reply", "user call reply answer user", call=(_UNICODE,), reply=(_UNICODE,)),
        probe("control tokens in tool reply", "user call reply", reply=(control_text,)),
    ]


def texts_of(messages: Sequence[Message]) -> list[tuple[Cause, str]]:
    """Return the texts of messages in the order of a render, each with the cause that a template names by omitting it.

    A text occurs once in a conversation, so that it can be found in a render.
    """
    return [(cause, text) for message in messages for cause, text in _texts_in(message) if text]


def _texts_in(message: Message) -> Iterator[tuple[Cause, str]]:
    if message["role"] != "assistant":
        is_system = message["role"] == "system"
        yield Cause.IGNORED_SYSTEM_PROMPT if is_system else Cause.OTHER, message["content"]
        return
    yield Cause.STRIPPED_REASONING, message.get("reasoning_content", "")
    yield Cause.DROPPED_TEXT, message["content"]
    for call in message.get("tool_calls", ()):
        yield Cause.DROPPED_CALL, call["function"]["arguments"]["city"]


def _probe(
    name: str,
    plan: str,
    *,
    has_tools: bool = False,
    is_essential: bool = False,
    **texts: Sequence[str],
) -> Probe:
    """Return the probe of a plan."""
    used = {word: iter(choice) for word, choice in {**_TEXTS, **texts}.items()}
    ids = (f"probe{number:04d}" for number in count(1))
    calls: list[ToolCall] = []
    messages: list[Message] = []
    for words in plan.split():
        message: Message = {"role": _ROLES.get(words, "assistant"), "content": ""}
        if message["role"] == "assistant":
            calls = []
        for word in words.split("+"):
            text = next(used[word])
            if word == "thinking":
                message["reasoning_content"] = text
            elif word == "call":
                calls.append(ToolCall(TOOL_NAME, {"city": text}, id=next(ids)))
                message["tool_calls"] = [call.as_message() for call in calls]
            else:
                message["content"] = text
        if words == "reply":
            message |= {"name": TOOL_NAME, "tool_call_id": calls.pop(0).id}
        messages.append(message)
    return Probe(name, messages, has_tools=has_tools, is_essential=is_essential)

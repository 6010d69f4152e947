"""What the messages of a trajectory say of its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_loop.tracing.bounded import bounded
from agent_loop.trajectory import Trajectory
from agent_loop.types import Message


@dataclass(frozen=True, slots=True)
class CallWords:
    """What a call asked, and what it was answered."""

    arguments: Any = None
    reply: str | None = None


@dataclass(frozen=True, slots=True)
class TurnWords:
    """What the messages behind an assistant turn hold. All of it is missing where nobody kept messages."""

    calls: Sequence[CallWords] = ()
    said: str | None = None
    """By an interaction, or a loop's own words to the model."""

    def call(self, number: int) -> CallWords:
        return self.calls[number] if number < len(self.calls) else CallWords()


@dataclass(slots=True)
class _Turn:
    message: Message
    replies: list[Message] = field(default_factory=list[Message])


def said_messages(trajectory: Trajectory) -> list[Message]:
    """The messages from the first completion on (the prompt may hold assistant messages of its own), without what the
    model's tokens say. Pictures are named, not held."""
    messages = trajectory.output.messages
    prompt: Sequence[Message] = trajectory.row.get("raw_prompt") or ()
    skip = sum(1 for message in prompt if message.get("role") == "assistant")
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            if skip == 0:
                return [_said(message) for message in messages[place:]]
            skip -= 1
    return []


def words_of_turns(messages: Sequence[Message]) -> list[TurnWords]:
    """One per assistant turn, in order.

    Args:
        messages: Those of `said_messages`.
    """
    turns: list[_Turn] = []
    for message in messages:
        if message["role"] == "assistant":
            turns.append(_Turn(message))
        elif turns:
            turns[-1].replies.append(message)
    return [_words_of(turn) for turn in turns]


def _said(message: Message) -> Message:
    if message["role"] == "assistant":
        calls = message.get("tool_calls")
        return {"role": "assistant", "tool_calls": calls} if calls else {"role": "assistant"}
    said: Message = {"role": message["role"], "content": _text_of(message)}
    name = message.get("name")
    return said | {"name": name} if name else said


def _words_of(turn: _Turn) -> TurnWords:
    # A call that could not be read is answered without a name.
    answers = [reply["content"] for reply in turn.replies if reply["role"] == "tool" and "name" in reply]
    said = [reply["content"] for reply in turn.replies if reply["role"] != "tool"]
    calls: Sequence[Mapping[str, Any]] = turn.message.get("tool_calls") or ()
    return TurnWords(
        calls=[
            CallWords(
                bounded(call["function"]["arguments"]), answers[number] if number < len(answers) else None
            )
            for number, call in enumerate(calls)
        ],
        said="\n".join(said) or None,
    )


def _text_of(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    parts: Sequence[Mapping[str, Any]] = content
    return "".join(str(part.get("text", f"<{part.get('type')}>")) for part in parts)

"""Texts of tool calls and replies, taken from the messages of a trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_loop.tracing.bounded import bounded
from agent_loop.trajectory import Trajectory
from agent_loop.types import Message


@dataclass(frozen=True, slots=True)
class CallTexts:
    """Arguments of a tool call, and its reply."""

    arguments: Any = None
    reply: str | None = None


@dataclass(frozen=True, slots=True)
class TurnTexts:
    """Texts from the messages after an assistant turn. Empty if no messages were kept."""

    calls: Sequence[CallTexts] = ()
    user_text: str | None = None
    """Text that an interaction or the loop sent to the model."""

    def call(self, number: int) -> CallTexts:
        return self.calls[number] if number < len(self.calls) else CallTexts()


@dataclass(slots=True)
class _Turn:
    message: Message
    replies: list[Message] = field(default_factory=list[Message])


def messages_to_trace(trajectory: Trajectory) -> list[Message]:
    """Return the messages from the first completion on, without the text that the model's tokens contain.

    Assistant messages of the prompt are skipped. Images and videos are replaced by the name of their type.
    """
    messages = trajectory.output.messages
    prompt: Sequence[Message] = trajectory.row.get("raw_prompt") or ()
    skip = sum(1 for message in prompt if message.get("role") == "assistant")
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            if skip == 0:
                return [_without_sampled_text(message) for message in messages[index:]]
            skip -= 1
    return []


def collect_turn_texts(messages: Sequence[Message]) -> list[TurnTexts]:
    """Return the texts of each assistant turn, oldest first.

    Args:
        messages: Result of `messages_to_trace`.
    """
    turns: list[_Turn] = []
    for message in messages:
        if message["role"] == "assistant":
            turns.append(_Turn(message))
        elif turns:
            turns[-1].replies.append(message)
    return [_words_of(turn) for turn in turns]


def _without_sampled_text(message: Message) -> Message:
    if message["role"] == "assistant":
        calls = message.get("tool_calls")
        return {"role": "assistant", "tool_calls": calls} if calls else {"role": "assistant"}
    user_text: Message = {"role": message["role"], "content": _text_of(message)}
    name = message.get("name")
    return user_text | {"name": name} if name else user_text


def _words_of(turn: _Turn) -> TurnTexts:
    # The reply to a malformed call has no name.
    answers = [reply["content"] for reply in turn.replies if reply["role"] == "tool" and "name" in reply]
    user_text = [reply["content"] for reply in turn.replies if reply["role"] != "tool"]
    calls: Sequence[Mapping[str, Any]] = turn.message.get("tool_calls") or ()
    return TurnTexts(
        calls=[
            CallTexts(
                bounded(call["function"]["arguments"]), answers[number] if number < len(answers) else None
            )
            for number, call in enumerate(calls)
        ],
        user_text="\n".join(user_text) or None,
    )


def _text_of(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    parts: Sequence[Mapping[str, Any]] = content
    return "".join(str(part.get("text", f"<{part.get('type')}>")) for part in parts)

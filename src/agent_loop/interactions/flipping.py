"""A conversation as the other side sees it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import dropwhile
from typing import Any, cast

from agent_loop.types import Message

OTHER_SIDE = {"user": "assistant", "assistant": "user"}
SILENCE = "(The assistant said nothing.)"


def flipped(messages: Sequence[Message], *, greeting: str) -> list[Message]:
    """The conversation with user and assistant exchanged. Turns alternate; the assistant's, now the user's, are the
    first and the last.

    System prompts, tools' replies and turns without words are left out. Turns of one side in a row are joined.

    Args:
        greeting: Stands first where the user's words came first.
    """
    turns: list[Message] = []
    for message in messages:
        role, text = OTHER_SIDE.get(message["role"]), text_of(message)
        if role is None or not text:
            continue
        if turns and turns[-1]["role"] == role:
            turns[-1] = {"role": role, "content": f"{turns[-1]['content']}\n\n{text}"}
        else:
            turns.append({"role": role, "content": text})
    if not turns or turns[0]["role"] == "assistant":
        turns.insert(0, {"role": "user", "content": greeting})
    if turns[-1]["role"] == "assistant":
        turns.append({"role": "user", "content": SILENCE})
    return turns


def num_replies(messages: Sequence[Message]) -> int:
    """User messages after the first of the assistant."""
    after = dropwhile(lambda message: message["role"] != "assistant", messages)
    return sum(message["role"] == "user" for message in after)


def text_of(message: Message) -> str:
    """The words of a message, without images."""
    content = message.get("content")
    if isinstance(content, list):
        parts = cast(list[dict[str, Any]], content)
        return "\n".join(str(part["text"]) for part in parts if part.get("type") == "text").strip()
    return str(content or "").strip()

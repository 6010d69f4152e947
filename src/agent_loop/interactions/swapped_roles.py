"""Conversations with the roles of user and assistant exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import dropwhile
from typing import Any, cast

from agent_loop.types import Message

OTHER_ROLE = {"user": "assistant", "assistant": "user"}
SILENCE = "(The assistant said nothing.)"


def with_roles_swapped(messages: Sequence[Message], *, greeting: str) -> list[Message]:
    """Return the conversation as the user sees it, with the roles of user and assistant exchanged.

    The returned turns alternate, and both the first and the last have the role `user`. System prompts, tool results
    and turns without text are dropped. Consecutive turns of one role are joined.

    Args:
        greeting: The first turn, if the user sent the first message of the conversation.
    """
    turns: list[Message] = []
    for message in messages:
        role, text = OTHER_ROLE.get(message["role"]), text_of(message)
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
    """Return the number of user messages after the first assistant message."""
    after = dropwhile(lambda message: message["role"] != "assistant", messages)
    return sum(message["role"] == "user" for message in after)


def text_of(message: Message) -> str:
    """Return the text of a message, without images."""
    content = message.get("content")
    if isinstance(content, list):
        parts = cast(list[dict[str, Any]], content)
        return "\n".join(str(part["text"]) for part in parts if part.get("type") == "text").strip()
    return str(content or "").strip()

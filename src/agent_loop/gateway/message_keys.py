"""Keys by which a session recognises messages that a client sends again.

Clients send the whole conversation with each request, and often rewrite it: an empty text becomes null or is left out,
a text becomes a list of parts, arguments of a call have other spaces and another order of keys, calls have other ids,
reasoning is dropped, and white space at the end is cut. Keys ignore these differences, which do not change the meaning.
All other differences count. A known conversation may therefore look new, which costs tokens, but no conversation is
mistaken for another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

from agent_loop.types import Message

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
EXACT_FLOAT = 2**53
"""Largest whole number up to which floats are exact, so that 2 and 2.0 are equal for every client."""


@dataclass(frozen=True, slots=True)
class MessageKey:
    """Keys by which one message is compared."""

    role: str
    key: str
    """Digest of the normalised message. For an assistant, without reasoning, which clients drop."""
    exact_key: str
    """Digest of the message as the client wrote it, with reasoning and names."""
    reasoning: str = ""
    call_ids: tuple[str, ...] = ()
    """The client's ids of an assistant's tool calls."""
    key_by_ids: str = ""
    """Digest of an assistant's message with the ids of its calls instead of their arguments; "" without ids."""


def opening_key(tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """Return a digest of what a conversation begins with: its tools, and the variables of the chat template.

    The order of the tools counts, the order of a schema's keys does not.
    """
    written = [_without_nulls(tool) for tool in tools]
    return digest("tools", written, variables) if variables else digest("tools", written)


def message_keys(messages: Sequence[Message]) -> list[MessageKey]:
    """Return the key of each message of a conversation.

    Args:
        messages: Messages as returned by `conversation_of`.
    """
    keys: list[MessageKey] = []
    positions: dict[str, int] = {}
    for message in messages:
        if message["role"] == "assistant":
            key = _assistant_key(message)
            positions = {call_id: position for position, call_id in enumerate(key.call_ids) if call_id}
        else:
            key = _other_key(message, positions)
        keys.append(key)
    return keys


def digest(*values: Any) -> str:
    """Return the digest of JSON values."""
    return _hash(_ENCODER.encode([_plain(value) for value in values]))


def chained(history: str, key: str) -> str:
    """Return the digest of a history with one more message, from the digests of both."""
    return _hash(history + key)


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=20).hexdigest()


def _assistant_key(message: Message) -> MessageKey:
    calls: list[dict[str, Any]] = message.get("tool_calls") or []
    functions = [[call["function"]["name"], call["function"]["arguments"]] for call in calls]
    call_ids = tuple(str(call.get("id") or "") for call in calls)
    content = message.get("content") or ""
    text = content.strip() if isinstance(content, str) else content
    key = digest("assistant", text, functions)
    reasoning = str(message.get("reasoning_content") or "").strip()
    is_bare = not reasoning and message.get("name") is None
    return MessageKey(
        role="assistant",
        key=key,
        exact_key=key if is_bare else digest(key, reasoning, message.get("name")),
        reasoning=reasoning,
        call_ids=call_ids,
        key_by_ids=digest("ids", text, [name for name, _ in functions], call_ids) if all(call_ids) else "",
    )


def _other_key(message: Message, positions: Mapping[str, int]) -> MessageKey:
    """Return the key of a message that is not an assistant's.

    A tool message is identified by the position of its call, because clients change call ids.
    """
    role, content = str(message["role"]), message.get("content") or ""
    text = content.rstrip() if isinstance(content, str) else content
    answered: Any = None
    name = message.get("name")
    if role == "tool":
        call_id = message.get("tool_call_id")
        answered = positions.get(str(call_id), call_id)
        name = None if isinstance(answered, int) else name
    key = digest(role, name, answered, text)
    return MessageKey(role=role, key=key, exact_key=key if text == content else digest(key, content))


def _plain(value: Any) -> Any:
    """Return a JSON value in which whole numbers are integers."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in cast(Sequence[Any], value)]
    if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT_FLOAT:
        return int(value)
    return value


def _without_nulls(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool without the fields of its function that are null."""
    function = cast(Mapping[str, Any], tool.get("function") or {})
    return {**tool, "function": {key: value for key, value in function.items() if value is not None}}

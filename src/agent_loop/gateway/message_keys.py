"""How a conversation is recognised when a client sends it again.

Clients keep a conversation as messages and write it anew for each request: an empty text may come back as null or not
at all, a text as a list of parts, the arguments of a call with other spaces and another order of keys, calls under
other ids, reasoning dropped, white space at the end cut off. None of that changes what was said, so the form in which
messages are compared has none of it. Everything else counts: a conversation that is known may look new, which costs
tokens, but none is taken for another.
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
"""Up to here each whole number is a float of its own, so that 2 and 2.0 are the same to any client."""


@dataclass(frozen=True, slots=True)
class MessageKey:
    """One message, in the forms by which it is compared."""

    role: str
    key: str
    """What it says. Of an assistant, without reasoning, which clients drop."""
    exact_key: str
    """As it is written, reasoning and names included."""
    reasoning: str = ""
    call_ids: tuple[str, ...] = ()
    """Of an assistant's calls, as the client names them."""


def tools_key(tools: Sequence[Mapping[str, Any]]) -> str:
    """What tells one list of tools from another; the order of the tools counts, that of a schema's keys does not."""
    written = [_without_nulls(tool) for tool in tools]
    return digest("tools", written)


def message_keys(messages: Sequence[Message]) -> list[MessageKey]:
    """The forms of a conversation's messages.

    Args:
        messages: As `conversation_of` gives them.
    """
    found: list[MessageKey] = []
    positions: dict[str, int] = {}
    for message in messages:
        if message["role"] == "assistant":
            link = _assistant_link(message)
            positions = {call_id: place for place, call_id in enumerate(link.call_ids) if call_id}
        else:
            link = _other_link(message, positions)
        found.append(link)
    return found


def digest(*parts: Any) -> str:
    """A short name of JSON values; what differs has another."""
    return _short(_ENCODER.encode([_plain(part) for part in parts]))


def chained(history: str, key: str) -> str:
    """A short name of a history that goes on with one more message, from the short names of both."""
    return _short(history + key)


def _short(text: str) -> str:
    return blake2b(text.encode(), digest_size=20).hexdigest()


def _assistant_link(message: Message) -> MessageKey:
    calls: list[dict[str, Any]] = message.get("tool_calls") or []
    said = [[call["function"]["name"], call["function"]["arguments"]] for call in calls]
    content = message.get("content") or ""
    key = digest("assistant", content.strip() if isinstance(content, str) else content, said)
    reasoning = str(message.get("reasoning_content") or "").strip()
    is_bare = not reasoning and message.get("name") is None
    return MessageKey(
        role="assistant",
        key=key,
        exact_key=key if is_bare else digest(key, reasoning, message.get("name")),
        reasoning=reasoning,
        call_ids=tuple(str(call.get("id") or "") for call in calls),
    )


def _other_link(message: Message, positions: Mapping[str, int]) -> MessageKey:
    """A tool's message is known by the place of the call that it answers, whatever the id."""
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
    """JSON in which whole numbers have one form."""
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
    """A tool without the fields of its function that say nothing."""
    function = cast(Mapping[str, Any], tool.get("function") or {})
    return {**tool, "function": {key: value for key, value in function.items() if value is not None}}

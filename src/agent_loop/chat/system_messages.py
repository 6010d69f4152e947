"""System messages in the middle of a conversation, for chat templates that refuse them or leave them out.

A template may render a system message at any place, only at the start, or at the start whatever its place. It may also
leave a later one out without an error. Whether a template renders system messages at their place is tried out once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary

from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import ChatTemplateError
from agent_loop.types import Message

_TEXTS = ("text.of.the.first", "text.of.the.second", "text.of.the.third", "text.of.the.fourth")
_PROMPTS = (("system", "system", "user"), ("system", "user", "system"), ("user", "system", "user", "system"))
_BRIDGES = (("system",), ("system", "user"), ("user", "system"), ("tool", "system"))


def settle_system_messages(messages: Sequence[Message], template: ChatTemplate) -> list[Message]:
    """Return the conversation in a form in which the template renders all of its system messages in their order.

    The messages are unchanged if the template renders system messages at any place. Otherwise, system messages at the
    start become one, and a later one becomes text of the user: `<system>` and `</system>` around it, in the user's
    message beside it, or in a message of its own. The result for a beginning of a conversation is the beginning of the
    result for the whole, as long as the cut is after an assistant's message.
    """
    num_first = sum(1 for _ in takewhile(lambda message: message["role"] == "system", messages))
    is_later = any(message["role"] == "system" for message in messages[num_first:])
    if (num_first < 2 and not is_later) or renders_system_messages(template):
        return list(messages)
    settled = [_joined(messages[:num_first])] if num_first else []
    was_system = False
    for message in messages[num_first:]:
        is_system = message["role"] == "system"
        shown = _as_user(message) if is_system else message
        if settled and (is_system or was_system) and _is_user(settled[-1]) and _is_user(shown):
            shown = _joined([settled.pop(), shown])
        settled.append(shown)
        was_system = is_system
    return settled


def renders_system_messages(template: ChatTemplate) -> bool:
    """Return whether the template renders a system message at its place, wherever it is."""
    known = _KNOWN.get(template)
    if known is None:
        known = _KNOWN[template] = _all_rendered(template)
    return known


_KNOWN: WeakKeyDictionary[ChatTemplate, bool] = WeakKeyDictionary()


def _all_rendered(template: ChatTemplate) -> bool:
    return all(_is_in_order(template.open, template, roles) for roles in _PROMPTS) and all(
        _is_in_order(template.bridge, template, roles)
        for roles in _BRIDGES
        if "tool" not in roles or not isinstance(template.bridges.tool, ChatTemplateError)
    )


def _is_in_order(encode: Any, template: ChatTemplate, roles: Sequence[str]) -> bool:
    """Return whether the texts of messages with these roles are in what the template renders, in their order."""
    texts = _TEXTS[: len(roles)]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    try:
        rendered = template.decode(encode(messages))
    except ChatTemplateError:
        return False
    found = [rendered.find(text) for text in texts]
    return found == sorted(found) and found[0] >= 0


def _is_user(message: Message) -> bool:
    return message["role"] == "user" and message.keys() == {"role", "content"}


def _as_user(message: Message) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return {"role": "user", "content": f"<system>\n{content}\n</system>"}
    return {"role": "user", "content": [_text_part("<system>"), *content, _text_part("</system>")]}


def _joined(messages: Sequence[Message]) -> Message:
    """Return one message with the contents of several messages of the same role."""
    contents = [message["content"] for message in messages]
    if all(isinstance(content, str) for content in contents):
        return {**messages[0], "content": "\n\n".join(content for content in contents if content)}
    parts = [[_text_part(content)] if isinstance(content, str) else content for content in contents]
    return {**messages[0], "content": [part for of_message in parts for part in of_message]}


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}

"""The form of messages and tools that chat templates get, whoever wrote them: rows, demonstrations or requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any, cast

import numpy as np

from agent_loop.chat.parsers.json_calls import JsonFault, decode_json
from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import ChatTemplateError, DataError
from agent_loop.files.plain_values import without_references
from agent_loop.runtime.describe import describe_value
from agent_loop.types import Message

REASONING_KEYS = ("reasoning", "thinking")
"""Keys of other systems for `reasoning_content`."""


class MessageError(DataError):
    """A message has another form than that of the OpenAI API."""

    def __init__(self, where: str, fault: str) -> None:
        super().__init__(f"{where}{fault}")
        self.where = where
        """The invalid field, such as `messages[1].content[0]`."""


def normalise_messages(messages: Iterable[Any], *, where: str) -> list[Message]:
    """Return messages in the form that a `ChatTemplate` takes.

    The role `developer` becomes `system`, and content parts that are all text become one text, joined by line breaks.
    Arguments of calls become mappings, also if they are JSON text. Replies to parallel calls follow the order of the
    calls if their ids name the calls, since many templates match them by position. Keys without a value are left out.
    """
    return _in_order_of_calls(
        [_message(message, where=f"{where}[{index}]") for index, message in enumerate(messages)]
    )


def normalise_tools(tools: Any, *, where: str) -> list[dict[str, Any]]:
    """Return tool schemas in the OpenAI form. Schemas without `type` and `function` around them get both."""
    tools = _plain(_decoded(tools, where=where) if isinstance(tools, str) else tools)
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise MessageError(where, f" is {describe_value(tools)}; give a list of tool schemas")
    decoded = [
        _decoded(tool, where=where) if isinstance(tool, str) else tool for tool in cast(list[Any], tools)
    ]
    for tool in decoded:
        if not isinstance(tool, dict):
            raise MessageError(where, f" holds {describe_value(tool)}; give a list of tool schemas")
    return [
        shown_tool({"type": "function", "function": tool} if _is_bare(tool) else tool) for tool in decoded
    ]


def shown_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool's schema as a model sees it, with its references resolved."""
    function: Any = tool.get("function")
    parameters: Any = (
        cast(Mapping[str, Any], function).get("parameters") if isinstance(function, Mapping) else None
    )
    if not isinstance(parameters, Mapping):
        return dict(tool)
    shown = without_references(cast(Mapping[str, Any], parameters))
    return {**tool, "function": {**cast(Mapping[str, Any], function), "parameters": shown}}


def without_added_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of an Arrow table, without the nulls in its messages and in its tools.

    All items of an Arrow column have the same fields. Arguments of one tool therefore get a null for every argument of
    the others, and so do schemas.
    """
    return {
        name: _without_nulls(value) if _has_messages_or_tools(value) else value for name, value in row.items()
    }


def _message(message: Any, *, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise MessageError(where, f" is {describe_value(message)}; {_SHAPE}")
    given = cast(Mapping[str, Any], message)
    role, calls = given.get("role"), _plain(given.get("tool_calls"))
    if not isinstance(role, str) or ("content" not in given and role != "assistant"):
        raise MessageError(where, f" has the keys {sorted(given)}; {_SHAPE}")
    written: Message = {
        "role": "system" if role == "developer" else role,
        "content": _content(given.get("content"), where=f"{where}.content"),
    }
    for key, value in given.items():
        if value is not None and key not in ("role", "content", "tool_calls", *REASONING_KEYS):
            written[key] = value
    for key in REASONING_KEYS:
        if isinstance(given.get(key), str):
            written.setdefault("reasoning_content", given[key])
    if not isinstance(calls, list | None):
        raise MessageError(f"{where}.tool_calls", f" is {describe_value(calls)}; give a list of calls")
    if calls and role != "assistant":
        raise MessageError(
            f"{where}.tool_calls", ": only assistant messages may have tool calls; remove them"
        )
    if calls:
        written["tool_calls"] = [
            _call(call, where=f"{where}.tool_calls[{index}]")
            for index, call in enumerate(cast(list[Any], calls))
        ]
    return written


def _content(content: Any, *, where: str) -> str | list[Any]:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, np.ndarray):
        content = content.tolist()
    if not isinstance(content, list | tuple):
        raise MessageError(where, f" is {describe_value(content)}; {_PARTS}")
    parts = [
        _part(part, where=f"{where}[{index}]") for index, part in enumerate(cast(Sequence[Any], content))
    ]
    if all(part.get("type") == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(part: Any, *, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise MessageError(where, f" is {describe_value(part)}; {_PARTS}")
    given = {key: value for key, value in cast(Mapping[str, Any], part).items() if value is not None}
    if given.get("type") != "text":
        return given
    if not isinstance(given.get("text"), str):
        raise MessageError(where, f" has the type text and no text; {_PARTS}")
    return {"type": "text", "text": given["text"]}


def _call(call: Any, *, where: str) -> dict[str, Any]:
    given = cast(dict[str, Any], call) if isinstance(call, dict) else {}
    function: Any = given if _is_bare(given) else given.get("function")
    name: Any = cast(dict[str, Any], function).get("name") if isinstance(function, dict) else None
    if (given.get("type") or "function") != "function" or not isinstance(name, str) or not name:
        raise MessageError(where, " is not a function call with a name; give type and function.name")
    arguments: Any = cast(dict[str, Any], function).get("arguments")
    if isinstance(arguments, str):
        arguments = _decoded(arguments, where=f"{where}.function.arguments") if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise MessageError(f"{where}.function.arguments", " must hold a JSON object")
    call_id = given.get("id")
    if not isinstance(call_id, str | None):
        raise MessageError(f"{where}.id", " must be a string")
    return {"type": "function", "id": call_id or "", "function": {"name": name, "arguments": arguments}}


def _in_order_of_calls(messages: list[Message]) -> list[Message]:
    """Return the messages, with the replies to each turn's calls in the order of the calls."""
    ordered = list(messages)
    for index, message in enumerate(messages):
        calls = message.get("tool_calls", ())
        positions = {call["id"]: number for number, call in enumerate(calls)}
        if len(positions) < max(2, len(calls)):  # an id that two calls share names neither
            continue
        replies = list(takewhile(lambda reply: reply["role"] == "tool", messages[index + 1 :]))
        if all(reply.get("tool_call_id") in positions for reply in replies):
            replies.sort(key=lambda reply: positions[reply["tool_call_id"]])
            ordered[index + 1 : index + 1 + len(replies)] = replies
    return ordered


def _is_bare(given: Mapping[str, Any]) -> bool:
    """Return whether a call or a schema lacks the object `function` around it."""
    return given.get("function") is None and isinstance(given.get("name"), str)


def _decoded(text: str, *, where: str) -> Any:
    try:
        return decode_json(text)
    except JsonFault as error:
        raise MessageError(where, f" is not valid JSON: {error}") from error


def _plain(value: Any) -> Any:
    """Return JSON values with the lists and numbers that Pandas holds as NumPy's."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in cast(Mapping[str, Any], value).items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(cast(Any, value).tolist())
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in cast(Sequence[Any], value)]
    return value


def _has_messages_or_tools(value: Any) -> bool:
    items: Iterator[Any] = iter(cast(Any, value)) if isinstance(value, list | np.ndarray) else iter(())
    first: Any = next(items, None)
    return isinstance(first, Mapping) and not {"role", "function", "parameters"}.isdisjoint(
        cast(Mapping[str, Any], first)
    )


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        held = cast(Mapping[str, Any], value)
        return {
            key: _without_nulls(inner)
            for key, inner in held.items()
            if inner is not None or (key == "content" and "role" in held)
        }
    if isinstance(value, list | tuple):
        return [_without_nulls(inner) for inner in cast(Sequence[Any], value)]
    return value


_SHAPE = 'give text, or messages like [{"role": "user", "content": "..."}]'
_PARTS = 'give text, or a list of parts like {"type": "text", "text": "..."}'


def settle_system_messages(messages: Sequence[Message], template: ChatTemplate) -> list[Message]:
    """Return the conversation in a form in which the template renders all of its system messages in their order.

    A template may render a system message at any place, only at the start, or at the start whatever its place, or leave
    a later one out. Whether it renders them at their place is tried out once.

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


@lru_cache(maxsize=64)
def renders_system_messages(template: ChatTemplate) -> bool:
    """Return whether the template renders a system message at its place, wherever it is."""
    roles = ("system", "system", "user", "system", "assistant", "system", "user", "system")
    messages = [{"role": role, "content": f"text.of.message.{index}"} for index, role in enumerate(roles)]
    try:
        for added, encode in ((messages, template.open), (messages[5:], template.bridge)):
            rendered = template.decode(encode(added))
            found = [rendered.find(message["content"]) for message in added]
            if found != sorted(found) or found[0] < 0:
                return False
    except ChatTemplateError:
        return False
    return True


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

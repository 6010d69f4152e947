"""Parsing of arguments that are written as bare text between two tags."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

from agent_loop.chat.parsers.completion_walker import (
    CallBlock,
    Tools,
    broken_call,
    find_first,
    quoted,
    skip_space,
)
from agent_loop.chat.parsers.untyped_values import parameter_schemas, read_value
from agent_loop.types import ToolCall

MAX_TAGS = 200
"""Maximum number of tags in a value, so that the time is linear in the text."""
MAX_NESTING = 8
"""Maximum nesting of arguments in a value."""


class TagFault(ValueError):
    """Raised if the tags of a call are invalid. The message is the model's reply."""


class TagMarks(NamedTuple):
    """Tags around an argument."""

    opening: re.Pattern[str]
    """Pattern up to the value. Its group `key` is the name of the argument. The value is a string if a group `type` is
    `string` or `true`."""
    closing: str
    """Text that ends the value."""
    forbidden: tuple[str, ...]
    """Further texts that a value cannot contain unless all tags in it are paired, since a closing may be missing before
    them."""
    end: re.Pattern[str]
    """Pattern that ends the call."""
    ending: str
    """Text of `end`, for errors."""
    block_open: str
    """Text that opens a call."""
    block_close: str
    call_close: str
    """Text up to which a malformed call extends."""
    breaks_lines: bool = False
    """Whether one line break on each side of a value belongs to the tags."""


def read_tagged_call(
    text: str, start: int, *, name: str, marks: TagMarks, tools: Tools
) -> tuple[ToolCall, int]:
    """Return the call whose arguments begin at `start`, and the position after the call.

    A value may contain the tags of arguments in pairs, and a closing that neither another argument nor the end of the
    call follows. A missing closing is read if the tool is known and has the arguments before and after it.
    """
    if not name:
        raise TagFault("the call does not name a tool")
    schemas = parameter_schemas(tools, name=name)
    arguments: dict[str, Any] = {}
    position = start
    while opening := marks.opening.match(text, position):
        key = opening["key"].strip()
        end, position = _value_end(text, opening.end(), key=key, marks=marks, schemas=schemas)
        if key in arguments:
            raise TagFault(f"the argument {quoted(key)} is given twice")
        value = text[opening.end() : end]
        if marks.breaks_lines and value.startswith("\n"):
            value = value.removeprefix("\n").removesuffix("\n")
        is_text = opening.groupdict().get("type") in ("string", "true")
        arguments[key] = value if is_text else read_value(value, schema=schemas.get(key))
    if not arguments and (nothing := _NOTHING.match(text, position)):
        position = nothing.end()
    end_tag = marks.end.match(text, position)
    if end_tag is None:
        raise TagFault(f"the arguments are followed by neither another argument nor {marks.ending}")
    return ToolCall(name, arguments), end_tag.end()


def read_tagged_block(
    text: str,
    start: int,
    tools: Tools,
    *,
    header: re.Pattern[str],
    missing: str,
    marks: TagMarks,
    stops: tuple[str, ...],
) -> CallBlock:
    """Return the block of a call with a header, such as `name">`, and tagged arguments.

    Args:
        text: The completion.
        start: Position of the header.
        tools: OpenAI function schemas.
        header: Pattern of the header. Its group `name` is the name of the tool.
        missing: Error of a call without a header.
        marks: Tags of the arguments.
        stops: Texts before which a malformed call ends.
    """
    try:
        found = header.match(text, start)
        if found is None:
            raise TagFault(missing)
        name = found["name"].strip()
        call, end = read_tagged_call(text, found.end(), name=name, marks=marks, tools=tools)
    except TagFault as fault:
        return broken_call(text, start, str(fault), closing=marks.call_close, stops=stops)
    return CallBlock((call,), end)


def _value_end(
    text: str, start: int, *, key: str, marks: TagMarks, schemas: Mapping[str, Any]
) -> tuple[int, int]:
    """Return the end of the value that begins at `start`, and the position after its closing."""
    end, tag = find_first(text, start, (marks.closing, *marks.forbidden))
    first_closing = (end, end + len(tag)) if tag == marks.closing else None
    if first_closing and _continues(text, first_closing[1], marks):
        return first_closing
    tags = _tags(marks)
    found = _paired_closing(text, islice(tags.finditer(text, start), MAX_TAGS), marks=marks)
    if found is None and key in schemas:
        found = _end_without_pairs(text, tags.finditer(text, start), marks=marks, schemas=schemas)
    if found or first_closing:
        return found or first_closing or (0, 0)
    raise TagFault(f"the argument {quoted(key)} is not closed with {marks.closing}")


def _paired_closing(text: str, tags: Iterator[re.Match[str]], *, marks: TagMarks) -> tuple[int, int] | None:
    """Return the first closing that belongs to no other argument in the value and ends the value."""
    depth, num_calls = 1, 0
    for tag in tags:
        if tag["key"] is not None:
            depth += 1
            if depth > MAX_NESTING:
                return None
        elif tag["open"] is not None:
            num_calls += 1
        elif tag["end"] is not None:
            if not num_calls and text.startswith(marks.block_open, skip_space(text, tag.end())):
                return None  # the closing is missing
            num_calls = max(0, num_calls - 1)
        elif tag["closing"] is not None and depth > 1:
            depth -= 1
        elif tag["closing"] is not None and _continues(text, tag.end(), marks):
            return tag.span()
    return None


def _end_without_pairs(
    text: str, tags: Iterator[re.Match[str]], *, marks: TagMarks, schemas: Mapping[str, Any]
) -> tuple[int, int] | None:
    """Return the end of a value that lacks its closing, or contains the opening of an argument that the tool lacks."""
    for tag in tags:
        if tag["closing"] is not None:
            return tag.span() if _continues(text, tag.end(), marks) else None
        is_next = tag["key"] is not None and tag["key"].strip() in schemas and text[tag.start() - 1] == "\n"
        if is_next or tag["end"] is not None:
            return tag.start(), tag.start()
        if tag["key"] is None:
            return None
    return None


def _continues(text: str, position: int, marks: TagMarks) -> bool:
    """Return whether another argument or the end of the call follows."""
    return bool(marks.opening.match(text, position) or marks.end.match(text, position))


@cache
def _tags(marks: TagMarks) -> re.Pattern[str]:
    """Return the pattern of all tags in a call."""
    opening, end = (pattern.pattern.removeprefix(r"\s*+") for pattern in (marks.opening, marks.end))
    return re.compile(
        rf"(?P<closing>{re.escape(marks.closing)})|{opening}|(?P<end>{end})"
        rf"|(?P<open>{re.escape(marks.block_open)})|{re.escape(marks.block_close)}"
    )


_NOTHING = re.compile(r"\s*+(?:null|\{\s*+\}|\"\")(?=\s*+<)")
"""Values that stand for no arguments."""

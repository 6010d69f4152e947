"""Parsing of arguments that are written as bare text between two tags (Qwen3-Coder, GLM)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from agent_loop.chat.parsers.completion_walker import find_first, quoted
from agent_loop.chat.parsers.untyped_values import parameter_schemas, read_value
from agent_loop.types import ToolCall


class TagFault(ValueError):
    """Raised if the tags of a call are invalid. The message is the model's reply."""


class TagMarks(NamedTuple):
    """Tags around an argument."""

    opening: re.Pattern[str]
    """Pattern up to the value. Its group `key` is the name of the argument."""
    closing: str
    """Text that ends the value. A value cannot contain the text."""
    forbidden: tuple[str, ...]
    """Further texts that a value cannot contain, since a closing is missing before them."""
    end: re.Pattern[str]
    """Pattern that ends the call."""
    ending: str
    """Text of `end`, for errors."""


def read_tagged_call(
    text: str, start: int, *, name: str, marks: TagMarks, tools: Sequence[Mapping[str, Any]]
) -> tuple[ToolCall, int]:
    """Return the call whose arguments begin at `start`, and the position after the call.

    Raises:
        TagFault: The tags of the call are invalid.
    """
    if not name:
        raise TagFault("the call does not name a tool")
    schemas = parameter_schemas(tools, name=name)
    arguments: dict[str, Any] = {}
    position = start
    while opening := marks.opening.match(text, position):
        key = opening["key"].strip()
        end, tag = find_first(text, opening.end(), (marks.closing, *marks.forbidden))
        if tag != marks.closing:
            raise TagFault(f"the argument {quoted(key)} is not closed with {marks.closing}")
        if key in arguments:
            raise TagFault(f"the argument {quoted(key)} is given twice")
        arguments[key] = read_value(_without_line_breaks(text[opening.end() : end]), schema=schemas.get(key))
        position = end + len(marks.closing)
    end_tag = marks.end.match(text, position)
    if end_tag is None:
        raise TagFault(f"the arguments are followed by neither another argument nor {marks.ending}")
    return ToolCall(name, arguments), end_tag.end()


def _without_line_breaks(value: str) -> str:
    """Return the value without one line break on each side, which some templates write."""
    return value.removeprefix("\n").removesuffix("\n") if value.startswith("\n") else value

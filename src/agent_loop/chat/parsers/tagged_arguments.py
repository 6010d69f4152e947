"""What formats share that write each argument as a pair of tags with bare text between them (Qwen3-Coder, GLM)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from agent_loop.chat.parsers.completion_walker import find_first, quoted
from agent_loop.chat.parsers.untyped_values import parameter_schemas, read_value
from agent_loop.types import ToolCall


class TagFault(ValueError):
    """A call's tags are not as they should be; the message says why, to the model."""


class TagMarks(NamedTuple):
    """How arguments are written."""

    opening: re.Pattern[str]
    """Matches up to the value; the group `key` is the argument's name."""
    closing: str
    """Ends the value. A value cannot hold it."""
    forbidden: tuple[str, ...]
    """What a value cannot hold either: a closing was forgotten before it."""
    end: re.Pattern[str]
    """Ends the call."""
    ending: str
    """The same in words."""


def read_tagged_call(
    text: str, start: int, *, name: str, marks: TagMarks, tools: Sequence[Mapping[str, Any]]
) -> tuple[ToolCall, int]:
    """The call whose arguments stand at `start`, and the position behind it.

    Raises:
        TagFault: It is not written as it should be.
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
        raise TagFault(f"behind the arguments comes neither another one nor {marks.ending}")
    return ToolCall(name, arguments), end_tag.end()


def _without_line_breaks(value: str) -> str:
    """The value without the one line break on each side that some templates write."""
    return value.removeprefix("\n").removesuffix("\n") if value.startswith("\n") else value

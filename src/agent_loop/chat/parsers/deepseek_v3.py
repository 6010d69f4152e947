"""The DeepSeek formats: V3 and R1 with type and fence, V3.1 with name and object alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agent_loop.chat.parsers.completion_walker import (
    THINK,
    CallBlock,
    SectionMarks,
    find_first,
    malformed,
    section_walker,
)
from agent_loop.chat.parsers.json_calls import read_arguments, read_body
from agent_loop.chat.parsers.tool_parser import ToolParser
from agent_loop.types import ParsedCompletion, ToolCall

MARKS = SectionMarks(
    section_open="<｜tool▁calls▁begin｜>",  # noqa: RUF001 (the format's own letters)
    section_close="<｜tool▁calls▁end｜>",  # noqa: RUF001
    call_open="<｜tool▁call▁begin｜>",  # noqa: RUF001
    call_close="<｜tool▁call▁end｜>",  # noqa: RUF001
)
SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
FENCE = "```"


@ToolParser.register("deepseek_v3")
class DeepSeekV3ToolParser(ToolParser):
    """Parser of the DeepSeek formats. V3 writes ``function<sep>name``, a line break and the arguments in a ``json``
    fence; V3.1 writes ``name<sep>{...}``. Each call is parsed by the format that it shows."""

    call_start = MARKS.section_open
    stream_stops = (MARKS.section_open, MARKS.section_close, MARKS.call_open)
    reasoning_marks = (THINK,)

    def parse(self, text: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCompletion:
        return _WALKER.read(text)

    def forced_call(self, name: str | None, *, chat_template: str) -> str | None:
        opening = f"{MARKS.section_open}{MARKS.call_open}"
        if name is None:
            return opening
        has_fences = f"{FENCE}json" in chat_template
        return (
            f"{opening}function{SEPARATOR}{name}\n{FENCE}json\n"
            if has_fences
            else f"{opening}{name}{SEPARATOR}"
        )

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        return MARKS.call_open in chat_template


def _read_call(text: str, start: int) -> CallBlock:
    end, marker = find_first(text, start, (SEPARATOR, *MARKS.stops))
    name = text[start:end].strip()
    if marker == MARKS.call_close and _BARE_NAME.fullmatch(name):
        return CallBlock((ToolCall(name, {}),), end + len(marker))
    if marker != SEPARATOR:
        after = end + len(marker) if marker == MARKS.call_close else end
        error = f"{MARKS.call_open} is not followed by a name and {SEPARATOR}"
        return CallBlock((malformed(text[start:end], error),), after)
    closings: tuple[str, ...] = (MARKS.call_close,)
    position = end + len(marker)
    if alone := _NAME_ALONE.match(text, position) if name == "function" else None:
        return CallBlock((ToolCall(alone["name"], {}),), alone.end())
    if fenced := _FENCED.match(text, position):
        name = fenced["name"]
        closings = (FENCE + MARKS.call_close, f"{FENCE}\n{MARKS.call_close}")
        position = fenced.end()
    body = read_body(text, position, closings=closings, stops=MARKS.stops)
    if not body.is_closed:
        error = f"the call is not closed with {closings[0]}"
        after = body.end + len(MARKS.call_close) * text.startswith(MARKS.call_close, body.end)
        return CallBlock((malformed(text[start : body.end], error),), after)
    return CallBlock((read_arguments(body, name=name),), body.end)


_FENCED = re.compile(r"\s*+(?P<name>[^\s<`{]++)\s*+```(?:json)?+\s*+")
_BARE_NAME = re.compile(r"[\w.-]++")
_NAME_ALONE = re.compile(rf"\s*+(?P<name>[\w.-]++)\s*+{re.escape(MARKS.call_close)}")
"""Name in the form of V3, without arguments."""
_WALKER = section_walker(MARKS, read_call=_read_call)

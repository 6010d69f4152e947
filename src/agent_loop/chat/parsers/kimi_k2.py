"""The Kimi K2 format: a section of
`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`."""

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
from agent_loop.chat.parsers.json_calls import as_call, read_arguments, read_body
from agent_loop.chat.parsers.tool_parser import ToolParser
from agent_loop.types import ParsedCompletion, ToolCall

MARKS = SectionMarks(
    section_open="<|tool_calls_section_begin|>",
    section_close="<|tool_calls_section_end|>",
    call_open="<|tool_call_begin|>",
    call_close="<|tool_call_end|>",
    others=("<|tool_call_section_begin|>", "<|tool_call_section_end|>"),
)
ARGUMENTS = "<|tool_call_argument_begin|>"


@ToolParser.register("kimi_k2")
class KimiK2ToolParser(ToolParser):
    """Parser of the Kimi K2 format. The id `functions.name:0` names the tool. The call keeps the id, since the template
    demands it in the reply. With an id of another form, the JSON may hold the name: `{"name": ..., "arguments":
    {...}}`."""

    call_start = MARKS.section_open
    stream_stops = (MARKS.section_open, MARKS.section_close, MARKS.call_open, *MARKS.others)
    reasoning_marks = (THINK,)

    def parse(self, text: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCompletion:
        return _WALKER.read(text)

    def forced_call(self, name: str | None, *, chat_template: str) -> str | None:
        opening = f"{MARKS.section_open}{MARKS.call_open}functions."
        return opening if name is None else f"{opening}{name}:"  # the model writes the number of the call

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        return ARGUMENTS in chat_template


def _read_call(text: str, start: int) -> CallBlock:
    end, marker = find_first(text, start, (ARGUMENTS, *MARKS.stops))
    call_id = text[start:end].strip()
    if marker == MARKS.call_close and _ID.fullmatch(call_id):
        return CallBlock((ToolCall(_name_in(call_id), {}, call_id),), end + len(marker))
    if marker != ARGUMENTS:
        after = end + len(marker) if marker == MARKS.call_close else end
        return CallBlock(
            (malformed(text[start:end], f"the call's id is not followed by {ARGUMENTS}"),), after
        )
    body = read_body(text, end + len(marker), closings=(MARKS.call_close,), stops=MARKS.stops)
    if not body.is_closed:
        error = f"the call is not closed with {MARKS.call_close}"
        return CallBlock((malformed(call_id + body.text, error),), body.end)
    call = read_arguments(body, name=_name_in(call_id), call_id=call_id)
    if isinstance(call, ToolCall) and not _ID.fullmatch(call_id) and call.arguments.keys() >= _WRAPPED:
        call = as_call({**call.arguments, "id": call_id}, text=body.text)
    return CallBlock((call,), body.end)


def _name_in(call_id: str) -> str:
    return re.sub(r":[0-9]+\Z", "", call_id.removeprefix("functions."))


_ID = re.compile(r"functions\.[\w.-]++(?::[0-9]++)?+|[\w.-]++:[0-9]++")
_WRAPPED = {"name", "arguments"}
_WALKER = section_walker(MARKS, read_call=_read_call)

"""Formats with a section of calls whose arguments are JSON: DeepSeek V3 and R1 with type and fence, DeepSeek V3.1 with
name and object alone, and Kimi K2:
`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`."""

from __future__ import annotations

import re

from agent_loop.chat.parsers.completion_walker import CallBlock, Tools, find_first, malformed
from agent_loop.chat.parsers.json_calls import as_call, read_arguments, read_body
from agent_loop.chat.parsers.tool_parser import SectionMarks, SectionToolParser, ToolParser
from agent_loop.types import ToolCall

DEEPSEEK = SectionMarks(
    section_open="<｜tool▁calls▁begin｜>",  # noqa: RUF001 (the format's own letters)
    section_close="<｜tool▁calls▁end｜>",  # noqa: RUF001
    call_open="<｜tool▁call▁begin｜>",  # noqa: RUF001
    call_close="<｜tool▁call▁end｜>",  # noqa: RUF001
)
SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
FENCE = "```"


@ToolParser.register("deepseek_v3")
class DeepSeekV3ToolParser(SectionToolParser):
    """Parser of the DeepSeek formats. V3 writes ``function<sep>name``, a line break and the arguments in a ``json``
    fence; V3.1 writes ``name<sep>{...}``. Each call is parsed by the format that it shows."""

    marks = DEEPSEEK
    call_start = marks.section_open
    stream_stops = marks.openings
    shown_by = (marks.call_open,)

    def forced_call(self, name: str | None, *, chat_template: str) -> str | None:
        opening = f"{self.marks.section_open}{self.marks.call_open}"
        if name is None:
            return opening
        if f"{FENCE}json" in chat_template:
            return f"{opening}function{SEPARATOR}{name}\n{FENCE}json\n"
        return f"{opening}{name}{SEPARATOR}"

    def read_call(self, text: str, start: int, tools: Tools) -> CallBlock:
        marks = self.marks
        end, marker = find_first(text, start, (SEPARATOR, *marks.stops))
        name = text[start:end].strip()
        if marker == marks.call_close and _BARE_NAME.fullmatch(name):
            return CallBlock((ToolCall(name, {}),), end + len(marker))
        if marker != SEPARATOR:
            after = end + len(marker) if marker == marks.call_close else end
            error = f"{marks.call_open} is not followed by a name and {SEPARATOR}"
            return CallBlock((malformed(text[start:end], error),), after)
        closings: tuple[str, ...] = (marks.call_close,)
        position = end + len(marker)
        if alone := _NAME_ALONE.match(text, position) if name == "function" else None:
            return CallBlock((ToolCall(alone["name"], {}),), alone.end())
        if fenced := _FENCED.match(text, position):
            name = fenced["name"]
            closings = (FENCE + marks.call_close, f"{FENCE}\n{marks.call_close}")
            position = fenced.end()
        body = read_body(text, position, closings=closings, stops=marks.stops)
        if not body.is_closed:
            error = f"the call is not closed with {closings[0]}"
            after = body.end + len(marks.call_close) * text.startswith(marks.call_close, body.end)
            return CallBlock((malformed(text[start : body.end], error),), after)
        return CallBlock((read_arguments(body, name=name),), body.end)


_FENCED = re.compile(r"\s*+(?P<name>[^\s<`{]++)\s*+```(?:json)?+\s*+")
_BARE_NAME = re.compile(r"[\w.-]++")
_NAME_ALONE = re.compile(rf"\s*+(?P<name>[\w.-]++)\s*+{re.escape(DEEPSEEK.call_close)}")
"""Name in the form of V3, without arguments."""
ARGUMENTS = "<|tool_call_argument_begin|>"


@ToolParser.register("kimi_k2")
class KimiK2ToolParser(SectionToolParser):
    """Parser of the Kimi K2 format. The id `functions.name:0` names the tool. The call keeps the id, since the template
    demands it in the reply. With an id of another form, the JSON may hold the name: `{"name": ..., "arguments":
    {...}}`."""

    marks = SectionMarks(
        section_open="<|tool_calls_section_begin|>",
        section_close="<|tool_calls_section_end|>",
        call_open="<|tool_call_begin|>",
        call_close="<|tool_call_end|>",
        others=("<|tool_call_section_begin|>", "<|tool_call_section_end|>"),
    )
    call_start = marks.section_open
    stream_stops = marks.openings
    shown_by = (ARGUMENTS,)

    def forced_call(self, name: str | None, *, chat_template: str) -> str | None:
        opening = f"{self.marks.section_open}{self.marks.call_open}functions."
        return opening if name is None else f"{opening}{name}:"  # the model writes the number of the call

    def read_call(self, text: str, start: int, tools: Tools) -> CallBlock:
        stops, close = self.marks.stops, self.marks.call_close
        end, marker = find_first(text, start, (ARGUMENTS, *stops))
        call_id = text[start:end].strip()
        name = re.sub(r":[0-9]+\Z", "", call_id.removeprefix("functions."))
        if marker == close and _ID.fullmatch(call_id):
            return CallBlock((ToolCall(name, {}, call_id),), end + len(marker))
        if marker != ARGUMENTS:
            after = end + len(marker) if marker == close else end
            error = f"the call's id is not followed by {ARGUMENTS}"
            return CallBlock((malformed(text[start:end], error),), after)
        body = read_body(text, end + len(marker), closings=(close,), stops=stops)
        if not body.is_closed:
            error = f"the call is not closed with {close}"
            return CallBlock((malformed(call_id + body.text, error),), body.end)
        call = read_arguments(body, name=name, call_id=call_id)
        if isinstance(call, ToolCall) and not _ID.fullmatch(call_id) and call.arguments.keys() >= _WRAPPED:
            call = as_call({**call.arguments, "id": call_id}, text=body.text)
        return CallBlock((call,), body.end)


_ID = re.compile(r"functions\.[\w.-]++(?::[0-9]++)?+|[\w.-]++:[0-9]++")
_WRAPPED = {"name", "arguments"}

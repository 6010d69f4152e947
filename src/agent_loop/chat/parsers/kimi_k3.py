"""The Kimi K3 format, in which every part of a turn is a tag:

```
<|open|>think<|sep|>...<|close|>think<|sep|><|open|>response<|sep|>...<|close|>response<|sep|>
<|open|>tools<|sep|><|open|>call tool="name" index="1"<|sep|>
<|open|>argument key="key" type="string"<|sep|>value<|close|>argument<|sep|>
<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>
```
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from agent_loop.chat.parsers.completion_walker import (
    CallBlock,
    ReasoningMarks,
    SectionMarks,
    malformed,
    section_walker,
)
from agent_loop.chat.parsers.json_calls import read_arguments, read_body
from agent_loop.chat.parsers.tagged_arguments import TagMarks, Tools, read_invoked_call
from agent_loop.chat.parsers.tool_parser import ToolParser
from agent_loop.types import ParsedCompletion


def _open(tag: str) -> str:
    return f"<|open|>{tag}<|sep|>"


def _close(tag: str) -> str:
    return f"<|close|>{tag}<|sep|>"


REASONING = ReasoningMarks(_open("think"), _close("think"))
SECTIONS = SectionMarks(
    section_open=_open("tools"),
    section_close=_close("tools"),
    call_open='<|open|>call tool="',
    call_close=_close("call"),
    others=(_open("response"), _close("response"), _close("message"), "<|end_of_msg|>"),
    reasoning=REASONING,
)
TAGS = TagMarks(
    opening=re.compile(
        r'\s*+<\|open\|>argument key="(?P<key>[^"<>\n]++)"(?:\s++type="(?P<type>\w++)")?+\s*+<\|sep\|>'
    ),
    closing=_close("argument"),
    forbidden=("<|open|>argument key=", SECTIONS.call_close, SECTIONS.section_close),
    end=re.compile(rf"\s*+{re.escape(SECTIONS.call_close)}"),
    ending=SECTIONS.call_close,
    block_open=SECTIONS.call_open,
    block_close=SECTIONS.section_close,
    breaks_lines=False,
)
OBJECT = _open('json type="object"')


@ToolParser.register("kimi_k3")
class KimiK3ToolParser(ToolParser):
    """Parser of the Kimi K3 format. The arguments of a call may also be one JSON object. For tags in values, see
    `tagged_arguments.py`. Completions are not streamed, since the answer itself is between tags."""

    reasoning_marks = (REASONING,)
    content_opening = _open("response")

    def parse(self, text: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCompletion:
        return section_walker(SECTIONS, read_call=partial(_read_call, tools=tools)).read(text)

    def forced_call(self, name: str | None, *, chat_template: str) -> str | None:
        opening = f"{SECTIONS.section_open}{SECTIONS.call_open}"
        return opening if name is None else f'{opening}{name}" index="1"<|sep|>'

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        return "<|open|>" in chat_template and "<|end_of_msg|>" in chat_template


def _read_call(text: str, start: int, *, tools: Tools) -> CallBlock:
    header = _HEADER.match(text, start)
    if header is None or not text.startswith(OBJECT, header.end()):
        return read_invoked_call(text, start, header=_HEADER, marks=TAGS, stops=SECTIONS.stops, tools=tools)
    closing = f"{_close('json')}{SECTIONS.call_close}"
    body = read_body(text, header.end() + len(OBJECT), closings=(closing,), stops=SECTIONS.stops)
    if not body.is_closed:
        return CallBlock((malformed(body.text, f"the call is not closed with {closing}"),), body.end)
    return CallBlock((read_arguments(body, name=header["name"]),), body.end)


_HEADER = re.compile(r'(?P<name>[^"<>\n]++)"(?:\s++index="[0-9]*+")?+\s*+<\|sep\|>')

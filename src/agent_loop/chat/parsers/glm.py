"""The GLM-4.5 format:

```
<tool_call>name
<arg_key>key</arg_key>
<arg_value>value</arg_value>
</tool_call>
```
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from agent_loop.chat.parsers.completion_walker import (
    THINK,
    CallBlock,
    CompletionWalker,
    find_first,
    malformed,
    skip_space,
)
from agent_loop.chat.parsers.json_calls import read_body, read_call
from agent_loop.chat.parsers.tagged_arguments import TagFault, TagMarks, read_tagged_call
from agent_loop.chat.parsers.tool_parser import ToolParser
from agent_loop.types import ParsedCompletion

OPEN, CLOSE, KEY = "<tool_call>", "</tool_call>", "<arg_key>"
MARKS = TagMarks(
    opening=re.compile(r"\s*+<arg_key>(?P<key>[^<>]++)</arg_key>\s*+<arg_value>"),
    closing="</arg_value>",
    forbidden=(KEY, "<arg_value>", CLOSE),
    end=re.compile(r"\s*+</tool_call>"),
    ending=CLOSE,
    block_open=OPEN,
    block_close=CLOSE,
    breaks_lines=False,
)
ENDS = ("<|observation|>", "<|user|>", "<|endoftext|>")


@ToolParser.register("glm")
class GlmToolParser(ToolParser):
    """Parser of the GLM format. The name is followed by a line break or directly by the first argument (GLM-4.7). A
    call may be a JSON object, as in the Hermes format. For tags in values, see `tagged_arguments.py`; for types, see
    `untyped_values.py`."""

    call_start = OPEN
    call_ends = (CLOSE,)
    reasoning_marks = (THINK,)

    def parse(self, text: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCompletion:
        return CompletionWalker({OPEN: partial(_read_block, tools=tools)}, ends=ENDS).read(text)

    def forced_call(self, name: str | None, *, chat_template: str) -> str | None:
        return OPEN if name is None else f"{OPEN}{name}\n"

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        return OPEN in chat_template and KEY in chat_template


def _read_block(text: str, start: int, *, tools: Sequence[Mapping[str, Any]]) -> CallBlock:
    if text.startswith("{", skip_space(text, start)):
        body = read_body(text, start, closings=(CLOSE,), stops=(OPEN, THINK.opening, THINK.closing))
        fault = malformed(body.text, f"the call is not closed with {CLOSE}")
        return CallBlock((read_call(body) if body.is_closed else fault,), body.end)
    try:
        name = _NAME.match(text, start)
        if name is None:
            raise TagFault(f"{OPEN} is not followed by the name of a tool")
        call, end = read_tagged_call(text, name.end(), name=name["name"], marks=MARKS, tools=tools)
    except TagFault as fault:
        end, marker = find_first(text, start, (CLOSE, OPEN, THINK.opening, THINK.closing))
        if marker == CLOSE:
            return CallBlock((malformed(text[start:end], str(fault)),), end + len(CLOSE))
        return CallBlock((malformed(text[start:end], f"{fault}; the call is not closed with {CLOSE}"),), end)
    return CallBlock((call,), end)


_NAME = re.compile(r"\s*+(?P<name>[^\s<>{}]++)")

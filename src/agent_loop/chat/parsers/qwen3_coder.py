"""The Qwen3-Coder format, XML in looks (Qwen3-Coder, Qwen3.5 and later, Nemotron 3):

```
<tool_call>
<function=name>
<parameter=key>
value
</parameter>
</function>
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
)
from agent_loop.chat.parsers.tagged_arguments import TagFault, TagMarks, read_tagged_call
from agent_loop.chat.parsers.tool_parser import ToolParser
from agent_loop.types import ParsedCompletion

OPEN, CLOSE, FUNCTION = "<tool_call>", "</tool_call>", "<function="
MARKS = TagMarks(
    opening=re.compile(r"\s*+<parameter=(?P<key>[^<>\n]++)>"),
    closing="</parameter>",
    forbidden=("<parameter=", CLOSE),
    end=re.compile(r"\s*+</function>\s*+</tool_call>"),
    ending=f"</function>{CLOSE}",
)


@ToolParser.register("qwen3_coder")
class Qwen3CoderToolParser(ToolParser):
    """Parser of the Qwen3-Coder format. A block holds one function; two are malformed, and so is a function outside of
    a block. A value cannot contain `<parameter=`, `</parameter>` or `</tool_call>`. For types, see
    `untyped_values.py`."""

    call_start = OPEN
    call_ends = (CLOSE,)
    stream_stops = (OPEN, FUNCTION)
    reasoning_marks = (THINK,)

    def parse(self, text: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCompletion:
        readers = {OPEN: partial(_read_block, tools=tools), FUNCTION: _read_bare_function}
        return CompletionWalker(readers).read(text)

    def forced_call(self, name: str | None, *, chat_template: str) -> str | None:
        opening = f"{OPEN}\n{FUNCTION}"
        return opening if name is None else f"{opening}{name}>\n"

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        return OPEN in chat_template and FUNCTION in chat_template


def _read_block(text: str, start: int, *, tools: Sequence[Mapping[str, Any]]) -> CallBlock:
    try:
        function = _FUNCTION.match(text, start)
        if function is None:
            raise TagFault(f"{OPEN} is not followed by {FUNCTION}name>")
        call, end = read_tagged_call(
            text, function.end(), name=function["name"].strip(), marks=MARKS, tools=tools
        )
    except TagFault as fault:
        return _skip(text, start, error=str(fault), stops=(OPEN,))
    return CallBlock((call,), end)


def _read_bare_function(text: str, start: int) -> CallBlock:
    return _skip(text, start, error=f"the function is not inside {OPEN}...{CLOSE}", stops=(OPEN, FUNCTION))


def _skip(text: str, start: int, *, error: str, stops: tuple[str, ...]) -> CallBlock:
    end, marker = find_first(text, start, (CLOSE, *stops, THINK.opening, THINK.closing))
    is_closed = marker == CLOSE
    call = malformed(text[start:end], error if is_closed else f"{error}; the call is not closed with {CLOSE}")
    return CallBlock((call,), end + len(marker) if is_closed else end)


_FUNCTION = re.compile(r"\s*+<function=(?P<name>[^<>\n]++)>")

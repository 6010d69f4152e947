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

from agent_loop.chat.parsers.base import ToolParser
from agent_loop.chat.parsers.tagged import TagFault, TagMarks, read_tagged_call
from agent_loop.chat.parsers.walking import THINK, Block, Walker, find_first, malformed
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
    """One function per block; two are malformed, and so is one without the block around it. A value cannot hold the
    format's own `<parameter=`, `</parameter>` and `</tool_call>`. Types: see `values.py`."""

    call_start = OPEN
    thoughts = (THINK,)

    def parse(self, text: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCompletion:
        readers = {OPEN: partial(_read_block, tools=tools), FUNCTION: _read_bare_function}
        return Walker(readers).read(text)

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        return OPEN in chat_template and FUNCTION in chat_template


def _read_block(text: str, start: int, *, tools: Sequence[Mapping[str, Any]]) -> Block:
    try:
        function = _FUNCTION.match(text, start)
        if function is None:
            raise TagFault(f"{OPEN} is not followed by {FUNCTION}name>")
        call, end = read_tagged_call(
            text, function.end(), name=function["name"].strip(), marks=MARKS, tools=tools
        )
    except TagFault as fault:
        return _skip(text, start, error=str(fault), stops=(OPEN,))
    return Block((call,), end)


def _read_bare_function(text: str, start: int) -> Block:
    return _skip(text, start, error=f"the function is not inside {OPEN}...{CLOSE}", stops=(OPEN, FUNCTION))


def _skip(text: str, start: int, *, error: str, stops: tuple[str, ...]) -> Block:
    end, marker = find_first(text, start, (CLOSE, *stops, THINK.opening, THINK.closing))
    is_closed = marker == CLOSE
    call = malformed(text[start:end], error if is_closed else f"{error}; the call is not closed with {CLOSE}")
    return Block((call,), end + len(marker) if is_closed else end)


_FUNCTION = re.compile(r"\s*+<function=(?P<name>[^<>\n]++)>")

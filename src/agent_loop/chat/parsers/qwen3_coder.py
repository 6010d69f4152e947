"""The Qwen3-Coder format, XML in looks (Qwen3-Coder, Qwen3.5 and later, Nemotron 3, Seed-OSS):

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
from typing import Any, ClassVar

from agent_loop.chat.parsers.completion_walker import (
    THINK,
    CallBlock,
    CompletionWalker,
    ReasoningMarks,
    find_first,
    malformed,
)
from agent_loop.chat.parsers.tagged_arguments import TagFault, TagMarks, read_tagged_call
from agent_loop.chat.parsers.tool_parser import ToolParser
from agent_loop.types import ParsedCompletion

FUNCTION = "<function="


def function_marks(block: str, *, breaks_lines: bool) -> TagMarks:
    """Return the tags of a format whose calls are inside `<block>`."""
    return TagMarks(
        opening=re.compile(r"\s*+<parameter=(?P<key>[^<>\n]++)>"),
        closing="</parameter>",
        forbidden=("<parameter=", f"</{block}>"),
        end=re.compile(rf"\s*+</function>\s*+</{block}>"),
        ending=f"</function></{block}>",
        block_open=f"<{block}>",
        block_close=f"</{block}>",
        breaks_lines=breaks_lines,
    )


@ToolParser.register("qwen3_coder")
class Qwen3CoderToolParser(ToolParser):
    """Parser of the Qwen3-Coder format. A block holds one function; two are malformed, and so is a function outside of
    a block. For tags in values, see `tagged_arguments.py`; for types, see `untyped_values.py`."""

    call_start = "<tool_call>"
    call_ends = ("</tool_call>",)
    stream_stops = (call_start, FUNCTION)
    reasoning_marks = (THINK,)
    tags = function_marks("tool_call", breaks_lines=True)
    ends: ClassVar[tuple[str, ...]] = ()

    def parse(self, text: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCompletion:
        readers = {
            self.call_start: partial(self._read_block, tools=tools),
            FUNCTION: self._read_bare_function,
        }
        return CompletionWalker(readers, reasoning_marks=self.reasoning_marks, ends=self.ends).read(text)

    def forced_call(self, name: str | None, *, chat_template: str) -> str | None:
        opening = f"{self.call_start}\n{FUNCTION}"
        return opening if name is None else f"{opening}{name}>\n"

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        return cls.call_start in chat_template and FUNCTION in chat_template

    def _read_block(self, text: str, start: int, *, tools: Sequence[Mapping[str, Any]]) -> CallBlock:
        try:
            function = _FUNCTION.match(text, start)
            if function is None:
                raise TagFault(f"{self.call_start} is not followed by {FUNCTION}name>")
            name = function["name"].strip()
            call, end = read_tagged_call(text, function.end(), name=name, marks=self.tags, tools=tools)
        except TagFault as fault:
            return self._skip(text, start, error=str(fault))
        return CallBlock((call,), end)

    def _read_bare_function(self, text: str, start: int) -> CallBlock:
        error = f"the function is not inside {self.call_start}...{self.call_ends[0]}"
        return self._skip(text, start, error=error, stops=(FUNCTION,))

    def _skip(self, text: str, start: int, *, error: str, stops: tuple[str, ...] = ()) -> CallBlock:
        [close], [(thought, thought_end, _)] = self.call_ends, self.reasoning_marks
        end, marker = find_first(text, start, (close, self.call_start, thought, thought_end, *stops))
        is_closed = marker == close
        error = error if is_closed else f"{error}; the call is not closed with {close}"
        return CallBlock((malformed(text[start:end], error),), end + len(marker) if is_closed else end)


@ToolParser.register("seed_oss")
class SeedOssToolParser(Qwen3CoderToolParser):
    """Parser of the format of Seed-OSS: that of Qwen3-Coder with other names of the blocks, and without line breaks
    around values."""

    call_start = "<seed:tool_call>"
    call_ends = ("</seed:tool_call>",)
    stream_stops = (call_start, FUNCTION)
    reasoning_marks = (ReasoningMarks("<seed:think>", "</seed:think>"),)
    tags = function_marks("seed:tool_call", breaks_lines=False)
    ends = ("<seed:eos>",)


_FUNCTION = re.compile(r"\s*+<function=(?P<name>[^<>\n]++)>")

"""The formats with a section of `<invoke name="tool">` blocks: MiniMax M2, and DSML (DeepSeek V3.2 and V4):

```
<minimax:tool_call>
<invoke name="name">
<parameter name="key">value</parameter>
</invoke>
</minimax:tool_call>
```
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from agent_loop.chat.parsers.completion_walker import THINK, SectionMarks, section_walker
from agent_loop.chat.parsers.tagged_arguments import TagMarks, read_invoked_call
from agent_loop.chat.parsers.tool_parser import ToolParser
from agent_loop.types import ParsedCompletion

DSML = "｜DSML｜"  # noqa: RUF001 (the format's own letters)


def section_marks(section: str, *, prefix: str = "", others: tuple[str, ...] = ()) -> SectionMarks:
    """Return the texts around the calls of a format with this section, and with a prefix before each other tag."""
    return SectionMarks(
        section_open=f"<{section}>",
        section_close=f"</{section}>",
        call_open=f'<{prefix}invoke name="',
        call_close=f"</{prefix}invoke>",
        others=others,
    )


def parameter_marks(sections: SectionMarks, *, prefix: str = "", attributes: str = "") -> TagMarks:
    """Return the tags of arguments: `<parameter name="key">`, with a pattern of further attributes."""
    return TagMarks(
        opening=re.compile(rf'\s*+<{prefix}parameter name="(?P<key>[^"<>\n]++)"{attributes}\s*+>'),
        closing=f"</{prefix}parameter>",
        forbidden=(f"<{prefix}parameter name=", sections.call_close, sections.section_close),
        end=re.compile(rf"\s*+{sections.call_close}"),
        ending=sections.call_close,
        block_open=sections.call_open,
        block_close=sections.section_close,
        breaks_lines=False,
    )


@ToolParser.register("minimax_m2")
class MiniMaxM2ToolParser(ToolParser):
    """Parser of the MiniMax M2 format. For tags in values, see `tagged_arguments.py`; for types, see
    `untyped_values.py`."""

    sections: ClassVar[SectionMarks] = section_marks("minimax:tool_call")
    tags: ClassVar[TagMarks] = parameter_marks(sections)
    call_start = sections.section_open
    stream_stops = (sections.section_open, sections.section_close, sections.call_open)
    reasoning_marks = (THINK,)

    def parse(self, text: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCompletion:
        read_call = partial(
            read_invoked_call, header=_HEADER, marks=self.tags, stops=self.sections.stops, tools=tools
        )
        return section_walker(self.sections, read_call=read_call).read(text)

    def forced_call(self, name: str | None, *, chat_template: str) -> str:
        opening = f"{self.sections.section_open}\n{self.sections.call_open}"
        return opening if name is None else f'{opening}{name}">\n'

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        return cls.call_start in chat_template


@ToolParser.register("deepseek_v4")
class DeepSeekV4ToolParser(MiniMaxM2ToolParser):
    """Parser of DSML. V4 writes `tool_calls` as the section, V3.2 `function_calls`. An attribute says which values are
    strings."""

    sections = section_marks(
        f"{DSML}tool_calls", prefix=DSML, others=(f"<{DSML}function_calls>", f"</{DSML}function_calls>")
    )
    tags = parameter_marks(sections, prefix=DSML, attributes=r'(?:\s++string="(?P<type>true|false)")?+')
    call_start = sections.call_open
    stream_stops = (sections.section_open, sections.section_close, call_start, *sections.others)

    def forced_call(self, name: str | None, *, chat_template: str) -> str:
        opening = super().forced_call(name, chat_template=chat_template)
        is_v3 = "function_calls>" in chat_template
        return opening.replace(self.sections.section_open, self.sections.others[0]) if is_v3 else opening

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        return DSML in chat_template


_HEADER = re.compile(r'(?P<name>[^"<>\n]++)"\s*+>')

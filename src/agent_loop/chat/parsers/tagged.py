"""Formats whose arguments are bare text between tags. For tags in values, see `tagged_arguments.py`; for types, see
`untyped_values.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from agent_loop.chat.parsers.completion_walker import (
    THINK,
    BlockReader,
    CallBlock,
    ReasoningMarks,
    Tools,
    broken_call,
    malformed,
    skip_space,
)
from agent_loop.chat.parsers.json_calls import read_arguments, read_body, read_call
from agent_loop.chat.parsers.tagged_arguments import TagMarks, read_tagged_block
from agent_loop.chat.parsers.tool_parser import SectionMarks, SectionToolParser, ToolParser

FUNCTION, ARGUMENT_KEY = "<function=", "<arg_key>"


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
        call_close=f"</{block}>",
        breaks_lines=breaks_lines,
    )


@ToolParser.register("qwen3_coder")
class Qwen3CoderToolParser(ToolParser):
    """Parser of the format of Qwen3-Coder, Qwen3.5 and later, and Nemotron 3:

    ```
    <tool_call>
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>
    ```

    A block holds one function; two are malformed, and so is a function outside of a block.
    """

    tags: ClassVar[TagMarks] = function_marks("tool_call", breaks_lines=True)
    call_start = tags.block_open
    call_ends = (tags.block_close,)
    stream_stops = (call_start, FUNCTION)
    reasoning_marks = (THINK,)
    shown_by = (call_start, FUNCTION)

    def readers(self) -> Mapping[str, BlockReader]:
        return {self.call_start: self._read_function, FUNCTION: self._read_bare_function}

    def forced_call(self, name: str | None, *, chat_template: str) -> str | None:
        opening = f"{self.call_start}\n{FUNCTION}"
        return opening if name is None else f"{opening}{name}>\n"

    @property
    def _stops(self) -> tuple[str, ...]:
        [(opening, closing, _)] = self.reasoning_marks
        return self.call_start, opening, closing

    def _read_function(self, text: str, start: int, tools: Tools) -> CallBlock:
        missing = f"{self.call_start} is not followed by {FUNCTION}name>"
        return read_tagged_block(
            text, start, tools, header=_FUNCTION, missing=missing, marks=self.tags, stops=self._stops
        )

    def _read_bare_function(self, text: str, start: int, tools: Tools) -> CallBlock:
        closing = self.tags.block_close
        error = f"the function is not inside {self.call_start}...{closing}"
        return broken_call(text, start, error, closing=closing, stops=(*self._stops, FUNCTION))


@ToolParser.register("seed_oss")
class SeedOssToolParser(Qwen3CoderToolParser):
    """Parser of the format of Seed-OSS: that of Qwen3-Coder with other names of the blocks, and without line breaks
    around values."""

    tags = function_marks("seed:tool_call", breaks_lines=False)
    call_start = tags.block_open
    call_ends = (tags.block_close,)
    stream_stops = (call_start, FUNCTION)
    reasoning_marks = (ReasoningMarks("<seed:think>", "</seed:think>"),)
    shown_by = (call_start, FUNCTION)
    turn_ends = ("<seed:eos>",)


_FUNCTION = re.compile(r"\s*+<function=(?P<name>[^<>\n]++)>")


@ToolParser.register("glm")
class GlmToolParser(ToolParser):
    """Parser of the GLM-4.5 format:

    ```
    <tool_call>name
    <arg_key>key</arg_key>
    <arg_value>value</arg_value>
    </tool_call>
    ```

    The name is followed by a line break or directly by the first argument (GLM-4.7). A call may be a JSON object, as in
    the Hermes format.
    """

    call_start = "<tool_call>"
    call_ends = ("</tool_call>",)
    reasoning_marks = (THINK,)
    shown_by = (call_start, ARGUMENT_KEY)
    turn_ends = ("<|observation|>", "<|user|>", "<|endoftext|>")

    def readers(self) -> Mapping[str, BlockReader]:
        return {self.call_start: _read_glm_block}

    def forced_call(self, name: str | None, *, chat_template: str) -> str | None:
        return self.call_start if name is None else f"{self.call_start}{name}\n"


def _read_glm_block(text: str, start: int, tools: Tools) -> CallBlock:
    stops = (_GLM.block_open, THINK.opening, THINK.closing)
    if text.startswith("{", skip_space(text, start)):
        body = read_body(text, start, closings=(_GLM.block_close,), stops=stops)
        fault = malformed(body.text, f"the call is not closed with {_GLM.block_close}")
        return CallBlock((read_call(body) if body.is_closed else fault,), body.end)
    missing = f"{_GLM.block_open} is not followed by the name of a tool"
    return read_tagged_block(text, start, tools, header=_NAME, missing=missing, marks=_GLM, stops=stops)


_NAME = re.compile(r"\s*+(?P<name>[^\s<>{}]++)")
_GLM = TagMarks(
    opening=re.compile(r"\s*+<arg_key>(?P<key>[^<>]++)</arg_key>\s*+<arg_value>"),
    closing="</arg_value>",
    forbidden=(ARGUMENT_KEY, "<arg_value>", "</tool_call>"),
    end=re.compile(r"\s*+</tool_call>"),
    ending="</tool_call>",
    block_open="<tool_call>",
    block_close="</tool_call>",
    call_close="</tool_call>",
)

NO_NAME = "the call does not name a tool"
DSML = "｜DSML｜"  # noqa: RUF001 (the format's own letters)


def invoke_marks(section: str, *, prefix: str = "", others: tuple[str, ...] = ()) -> SectionMarks:
    """Return the texts around the calls of a format with this section, and with a prefix before each other tag."""
    return SectionMarks(
        section_open=f"<{section}>",
        section_close=f"</{section}>",
        call_open=f'<{prefix}invoke name="',
        call_close=f"</{prefix}invoke>",
        others=others,
    )


def argument_marks(sections: SectionMarks, opening: str, *, start: str, closing: str) -> TagMarks:
    """Return the tags of the arguments of a call in a section.

    Args:
        sections: Texts around calls.
        opening: Pattern of the tag that opens an argument.
        start: Text with which that tag begins.
        closing: Text that closes an argument.
    """
    return TagMarks(
        opening=re.compile(rf"\s*+{opening}"),
        closing=closing,
        forbidden=(start, sections.call_close, sections.section_close),
        end=re.compile(rf"\s*+{re.escape(sections.call_close)}"),
        ending=sections.call_close,
        block_open=sections.call_open,
        block_close=sections.section_close,
        call_close=sections.call_close,
    )


def parameter_marks(sections: SectionMarks, *, prefix: str = "", attributes: str = "") -> TagMarks:
    """Return the tags of `<parameter name="key">`, with a pattern of further attributes."""
    start = f"<{prefix}parameter name="
    opening = rf'{start}"(?P<key>[^"<>\n]++)"{attributes}\s*+>'
    return argument_marks(sections, opening, start=start, closing=f"</{prefix}parameter>")


@ToolParser.register("minimax_m2")
class MiniMaxM2ToolParser(SectionToolParser):
    """Parser of the MiniMax M2 format:

    ```
    <minimax:tool_call>
    <invoke name="name">
    <parameter name="key">value</parameter>
    </invoke>
    </minimax:tool_call>
    ```
    """

    marks = invoke_marks("minimax:tool_call")
    tags: ClassVar[TagMarks] = parameter_marks(marks)
    call_start = marks.section_open
    stream_stops = marks.openings
    shown_by = (call_start,)

    def forced_call(self, name: str | None, *, chat_template: str) -> str:
        opening = f"{self.marks.section_open}\n{self.marks.call_open}"
        return opening if name is None else f'{opening}{name}">\n'

    def read_call(self, text: str, start: int, tools: Tools) -> CallBlock:
        return read_tagged_block(
            text, start, tools, header=_INVOKE, missing=NO_NAME, marks=self.tags, stops=self.marks.stops
        )


_INVOKE = re.compile(r'(?P<name>[^"<>\n]++)"\s*+>')


@ToolParser.register("deepseek_v4")
class DeepSeekV4ToolParser(MiniMaxM2ToolParser):
    """Parser of DSML. V4 writes `tool_calls` as the section, V3.2 `function_calls`. An attribute says which values are
    strings."""

    marks = invoke_marks(
        f"{DSML}tool_calls", prefix=DSML, others=(f"<{DSML}function_calls>", f"</{DSML}function_calls>")
    )
    tags = parameter_marks(marks, prefix=DSML, attributes=r'(?:\s++string="(?P<type>true|false)")?+')
    call_start = marks.call_open
    stream_stops = marks.openings
    shown_by = (DSML,)

    def forced_call(self, name: str | None, *, chat_template: str) -> str:
        opening = super().forced_call(name, chat_template=chat_template)
        is_v3 = "function_calls>" in chat_template
        return opening.replace(self.marks.section_open, self.marks.others[0]) if is_v3 else opening


def _open(tag: str) -> str:
    return f"<|open|>{tag}<|sep|>"


def _close(tag: str) -> str:
    return f"<|close|>{tag}<|sep|>"


OBJECT = _open('json type="object"')


@ToolParser.register("kimi_k3")
class KimiK3ToolParser(SectionToolParser):
    """Parser of the Kimi K3 format, in which every part of a turn is a tag:

    ```
    <|open|>think<|sep|>...<|close|>think<|sep|><|open|>response<|sep|>...<|close|>response<|sep|>
    <|open|>tools<|sep|><|open|>call tool="name" index="1"<|sep|>
    <|open|>argument key="key" type="string"<|sep|>value<|close|>argument<|sep|>
    <|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>
    ```

    The arguments of a call may also be one JSON object. Completions are not streamed, since the answer is between tags.
    """

    marks = SectionMarks(
        section_open=_open("tools"),
        section_close=_close("tools"),
        call_open='<|open|>call tool="',
        call_close=_close("call"),
        others=(_open("response"), _close("response"), _close("message"), "<|end_of_msg|>"),
        reasoning=ReasoningMarks(_open("think"), _close("think")),
    )
    tags: ClassVar[TagMarks] = argument_marks(
        marks,
        r'<\|open\|>argument key="(?P<key>[^"<>\n]++)"(?:\s++type="(?P<type>\w++)")?+\s*+<\|sep\|>',
        start="<|open|>argument key=",
        closing=_close("argument"),
    )
    shown_by = ("<|open|>", "<|end_of_msg|>")
    content_opening = _open("response")

    def forced_call(self, name: str | None, *, chat_template: str) -> str | None:
        opening = f"{self.marks.section_open}{self.marks.call_open}"
        return opening if name is None else f'{opening}{name}" index="1"<|sep|>'

    def read_call(self, text: str, start: int, tools: Tools) -> CallBlock:
        stops = self.marks.stops
        header = _CALL.match(text, start)
        if header is None or not text.startswith(OBJECT, header.end()):
            return read_tagged_block(
                text, start, tools, header=_CALL, missing=NO_NAME, marks=self.tags, stops=stops
            )
        closing = f"{_close('json')}{self.marks.call_close}"
        body = read_body(text, header.end() + len(OBJECT), closings=(closing,), stops=stops)
        if not body.is_closed:
            return CallBlock((malformed(body.text, f"the call is not closed with {closing}"),), body.end)
        return CallBlock((read_arguments(body, name=header["name"]),), body.end)


_CALL = re.compile(r'(?P<name>[^"<>\n]++)"(?:\s++index="[0-9]*+")?+\s*+<\|sep\|>')

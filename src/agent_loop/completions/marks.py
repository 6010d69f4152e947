"""The texts at which the streaming of a completion has to stop and think, by tool parser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agent_loop.chat.parsers import (
    DeepSeekV3ToolParser,
    GemmaToolParser,
    GlmToolParser,
    GptOssToolParser,
    HermesToolParser,
    KimiK2ToolParser,
    Llama3JsonToolParser,
    MistralToolParser,
    Qwen3CoderToolParser,
    ToolParser,
    deepseek_v3,
    gemma,
    hermes,
    kimi_k2,
    llama3_json,
    mistral,
    qwen3_coder,
)
from agent_loop.chat.parsers.sections import SectionMarks
from agent_loop.chat.parsers.walking import THINK, Thought


@dataclass(frozen=True, slots=True)
class Marks:
    """What a format writes between the words."""

    openings: tuple[str, ...]
    """Behind any of these may stand a call."""
    thoughts: tuple[Thought, ...] = (THINK,)

    @property
    def thought_openings(self) -> Mapping[str, Thought]:
        return {thought.opening: thought for thought in self.thoughts}

    @property
    def thought_closings(self) -> frozenset[str]:
        return frozenset(thought.closing for thought in self.thoughts)


def marks_of(parser: ToolParser) -> Marks | None:
    """The marks of a parser's format; None if they are not known, so that a completion is read at its end only."""
    for kind in type(parser).__mro__:
        if kind in _MARKS:
            return _MARKS[kind]
    if parser.call_start is None or parser.reads_end_tokens:
        return None
    return Marks((parser.call_start,), parser.thoughts or (THINK,))


def _section(marks: SectionMarks) -> Marks:
    return Marks((marks.section_open, marks.section_close, marks.call_open))


_MARKS: Mapping[type, Marks | None] = {
    DeepSeekV3ToolParser: _section(deepseek_v3.MARKS),
    GemmaToolParser: Marks((gemma.GEMMA_4.opening, gemma.FUNCTION_GEMMA.opening), (gemma.THOUGHT,)),
    GlmToolParser: Marks((hermes.OPEN,)),
    GptOssToolParser: None,  # every message of the harmony format has a header
    HermesToolParser: Marks((hermes.OPEN,)),
    KimiK2ToolParser: _section(kimi_k2.MARKS),
    Llama3JsonToolParser: Marks(("{", llama3_json.PYTHON_TAG)),
    MistralToolParser: Marks((mistral.OPEN,), mistral.THOUGHTS),
    Qwen3CoderToolParser: Marks((qwen3_coder.OPEN, qwen3_coder.FUNCTION)),
}

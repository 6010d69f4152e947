"""Parsing of formats that put the calls of a turn in one section (DeepSeek, Kimi, MiniMax)."""

from __future__ import annotations

from dataclasses import dataclass

from agent_loop.chat.parsers.completion_walker import (
    THINK,
    BlockReader,
    CallBlock,
    CompletionWalker,
    ReasoningMarks,
    find_first,
    malformed,
    skip_space,
)


@dataclass(frozen=True, slots=True)
class SectionMarks:
    """Texts that open and close a section and each call in it."""

    section_open: str
    section_close: str
    call_open: str
    call_close: str
    others: tuple[str, ...] = ()
    """Further texts of the format that are left out of the content."""
    reasoning: ReasoningMarks = THINK

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts at which a call without a closing ends."""
        return (
            self.section_open,
            self.section_close,
            self.call_open,
            self.call_close,
            self.reasoning.opening,
            self.reasoning.closing,
            *self.others,
        )


def section_walker(marks: SectionMarks, *, read_call: BlockReader) -> CompletionWalker:
    """Return the walker of a format with sections.

    A section that does not begin with a call is malformed. Complete calls count even if their section is not closed or
    they are outside of a section.
    """

    def read_section(text: str, start: int) -> CallBlock:
        if text.startswith(marks.call_open, skip_space(text, start)):
            return CallBlock((), start)
        end, _ = find_first(text, start, marks.stops)
        error = f"{marks.section_open} is not followed by {marks.call_open}"
        return CallBlock((malformed(text[start:end], error),), end)

    readers = {marks.section_open: read_section, marks.call_open: read_call}
    ignored = (marks.section_close, *marks.others)
    return CompletionWalker(readers, reasoning_marks=(marks.reasoning,), ignored=ignored)

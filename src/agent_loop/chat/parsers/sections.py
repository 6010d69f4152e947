"""What formats share that gather the calls of a turn in one section (DeepSeek, Kimi)."""

from __future__ import annotations

from dataclasses import dataclass

from agent_loop.chat.parsers.walking import THINK, Block, Reader, find_first, malformed, skip_space, walk
from agent_loop.types import ParsedCompletion


@dataclass(frozen=True, slots=True)
class SectionMarks:
    """The texts that open and close a section and each call in it."""

    section_open: str
    section_close: str
    call_open: str
    call_close: str

    @property
    def stops(self) -> tuple[str, ...]:
        """Where a call that is not closed ends."""
        return (
            self.section_open,
            self.section_close,
            self.call_open,
            self.call_close,
            THINK.opening,
            THINK.closing,
        )


def walk_sections(text: str, *, marks: SectionMarks, read_call: Reader) -> ParsedCompletion:
    """Reads a completion. A section that begins without a call is malformed; the calls of a section that is not closed,
    and calls outside any section, count if they are whole themselves."""

    def read_section(text: str, start: int) -> Block:
        if text.startswith(marks.call_open, skip_space(text, start)):
            return Block((), start)
        end, _ = find_first(text, start, marks.stops)
        error = f"{marks.section_open} is not followed by {marks.call_open}"
        return Block((malformed(text[start:end], error),), end)

    readers = {marks.section_open: read_section, marks.call_open: read_call}
    return walk(text, readers=readers, ignored=(marks.section_close,))

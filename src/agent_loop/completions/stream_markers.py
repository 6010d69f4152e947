"""Markers of tool calls and reasoning at which streaming holds text back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agent_loop.chat.parsers import THINK, ReasoningMarks, ToolParser


@dataclass(frozen=True, slots=True)
class StreamMarkers:
    """Markers of the format of one model family."""

    openings: tuple[str, ...]
    """Texts that may start a tool call."""
    reasoning_marks: tuple[ReasoningMarks, ...] = (THINK,)
    """Marks around reasoning."""

    @property
    def reasoning_openings(self) -> Mapping[str, ReasoningMarks]:
        return {marks.opening: marks for marks in self.reasoning_marks}

    @property
    def reasoning_closings(self) -> frozenset[str]:
        return frozenset(marks.closing for marks in self.reasoning_marks)


def stream_markers(parser: ToolParser) -> StreamMarkers | None:
    """Return the markers of a parser's format, or None if the parser can only read whole completions."""
    openings = parser.stream_stops or ((parser.call_start,) if parser.call_start else ())
    if not openings or parser.reads_end_tokens:
        return None
    return StreamMarkers(openings, parser.reasoning_marks or (THINK,))

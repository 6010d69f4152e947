"""A completion's text, read while it comes: what is said, what is thought, what is called.

Text flows at once, until it could be the beginning of a call; the rest is read at the end, as calls may be longer than
any look-ahead. However the text is cut into parts, what comes out is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_loop.chat.parsers import ToolParser
from agent_loop.chat.parsers.completion_walker import ReasoningMarks, find_first
from agent_loop.completions.detokenizer import longest_partial_match
from agent_loop.completions.stream_markers import StreamMarkers, stream_markers
from agent_loop.types import ToolCall


@dataclass(frozen=True, slots=True)
class ParsedDelta:
    """What a part of a completion adds."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __add__(self, other: ParsedDelta) -> ParsedDelta:
        return ParsedDelta.joined([self, other])

    @classmethod
    def joined(cls, parts: Sequence[ParsedDelta]) -> ParsedDelta:
        """What several parts add together."""
        return cls(
            "".join(part.content for part in parts),
            "".join(part.reasoning for part in parts),
            tuple(call for part in parts for call in part.tool_calls),
        )


class StreamParser:
    """Reads one completion.

    Without tools nothing is a call: such text is content, as it was written. A call that cannot be read stays in the
    content too, and is never mended. White space around the content, and line breaks around reasoning, are left out.

    Args:
        parser: Of the model's format.
        tools: What may be called.
        prompt_end: The last characters of the prompt's text, which may open reasoning.
        continues: The completion continues a text, so that white space at its beginning is kept.
    """

    def __init__(
        self,
        parser: ToolParser,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        prompt_end: str = "",
        continues: bool = False,
    ) -> None:
        self._parser = parser
        self._tools = tools
        self._marks = stream_markers(parser)
        marks = self._marks or StreamMarkers((), ())
        self._openings = marks.openings if tools else ()
        self._markers = (*self._openings, *marks.reasoning_openings, *marks.reasoning_closings)
        self._thought = _opened_by(prompt_end, marks)
        """The reasoning that is open."""
        self._is_label_due = False
        """What stands behind the opening of reasoning is still to be looked at."""
        self._pending = ""
        """Text that may be the beginning of a marker."""
        self._said: list[str] = []
        """Text outside of reasoning, as it was written."""
        self._held: list[str] = []
        """Everything from the first opening of a call on."""
        self._content = _Trimmed(None, is_at_start=not continues)
        self._reasoning = _Trimmed("\n")

    def feed(self, text: str) -> ParsedDelta:
        """Reads the next part."""
        if self._held or self._marks is None:
            self._held.append(text)
            return ParsedDelta()
        self._pending += text
        content: list[str] = []
        reasoning: list[str] = []
        while not self._held:
            if self._thought is None:
                goes_on = self._read_said(self._marks, content)
            else:
                goes_on = self._read_thought(self._thought, reasoning)
            if not goes_on:
                break
        return ParsedDelta("".join(content), "".join(reasoning))

    def finish(self) -> ParsedDelta:
        """Reads what was held back."""
        if self._marks is None:
            return self._read_whole("".join(self._held))
        if self._thought is not None:
            return ParsedDelta(reasoning=self._think(self._thought, self._pending))
        if not self._held:
            return ParsedDelta(content=self._say(self._pending))
        held = "".join(self._held)
        parsed = self._parser.parse("".join(self._said) + held, tools=self._tools)
        if parsed.calls and not parsed.tool_calls:
            return ParsedDelta(self._content.add(held))
        self._reasoning.begin_block()
        reasoning = self._reasoning.add(parsed.reasoning or "")
        given = self._content.given
        rest = parsed.content[len(given) :] if parsed.content.startswith(given) else ""
        rest += "".join(f"\n{call.text}" for call in parsed.malformed_calls)
        return ParsedDelta(rest if given else rest.lstrip(), reasoning, tuple(parsed.tool_calls))

    def _read_said(self, marks: StreamMarkers, content: list[str]) -> bool:
        """Reads up to the next marker; tells whether there was one."""
        start, marker = find_first(self._pending, 0, self._markers)
        if not marker:
            start -= longest_partial_match(self._pending, self._markers)
        content.append(self._say(self._pending[:start]))
        if marker in self._openings:
            self._held.append(self._pending[start:])
            self._pending = ""
            return False
        self._pending = self._pending[start + len(marker) :]
        if marker in marks.reasoning_openings:
            self._thought = marks.reasoning_openings[marker]
            self._is_label_due = True
            self._reasoning.begin_block()
        return bool(marker)

    def _read_thought(self, thought: ReasoningMarks, reasoning: list[str]) -> bool:
        """Reads reasoning up to its closing; tells whether it is closed."""
        end, closing = find_first(self._pending, 0, (thought.closing,))
        if not closing:
            end -= longest_partial_match(self._pending, (thought.closing,))
            if self._is_label_due and end < len(thought.label):
                return False
        reasoning.append(self._think(thought, self._pending[:end]))
        self._pending = self._pending[end + len(closing) :]
        if closing:
            self._thought = None
        return bool(closing)

    def _think(self, thought: ReasoningMarks, text: str) -> str:
        if self._is_label_due:
            text = text.removeprefix(thought.label)
            self._is_label_due = False
        return self._reasoning.add(text)

    def _say(self, text: str) -> str:
        self._said.append(text)
        return self._content.add(text)

    def _read_whole(self, text: str) -> ParsedDelta:
        parsed = self._parser.parse(text, tools=self._tools)
        calls = parsed.tool_calls if self._tools else []
        if parsed.calls and not calls:
            return ParsedDelta(text.strip())
        content = "\n".join(
            [*filter(None, [parsed.content]), *(call.text for call in parsed.malformed_calls)]
        )
        return ParsedDelta(content, parsed.reasoning or "", tuple(calls))


class _Trimmed:
    """Text that is given out without the space around it: what may be its end waits for more.

    Args:
        space: The characters that are left out; None is all white space.
        is_at_start: Space before the first text is left out too.
    """

    def __init__(self, space: str | None, *, is_at_start: bool = True) -> None:
        self._space = space
        self._before = ""
        """Stands before the next text."""
        self._is_at_start = is_at_start
        self._waiting: list[str] = []
        self._parts: list[str] = []

    @property
    def given(self) -> str:
        return "".join(self._parts)

    def begin_block(self) -> None:
        """What follows is a block of its own, on a line of its own."""
        self._is_at_start = True
        self._before = "\n" if self._parts else ""
        self._waiting.clear()

    def add(self, text: str) -> str:
        if not text.strip(self._space):
            if not self._is_at_start:
                self._waiting.append(text)
            return ""
        before = self._before if self._is_at_start else "".join(self._waiting)
        text = text.lstrip(self._space) if self._is_at_start else text
        kept = text.rstrip(self._space)
        self._is_at_start = False
        self._waiting = [text[len(kept) :]]
        self._parts.append(before + kept)
        return before + kept


def _opened_by(prompt_end: str, marks: StreamMarkers) -> ReasoningMarks | None:
    """The reasoning that the prompt itself opens."""
    end = prompt_end.rstrip()
    return next((t for t in marks.reasoning_marks if end.endswith((t.opening, t.opening + t.label))), None)

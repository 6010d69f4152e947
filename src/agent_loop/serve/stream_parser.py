"""Parses the text of a completion while it is sampled, into content, reasoning and tool calls.

Text is returned immediately until it may be the start of a tool call. The rest is parsed at the end, because a call
may be longer than any look-ahead. The result does not depend on how the text is split into pieces.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_loop.chat.detokenizer import StreamDetokenizer, longest_partial_match
from agent_loop.chat.encoding import num_shared
from agent_loop.chat.parsers import THINK, ReasoningMarks, ToolParser
from agent_loop.chat.parsers.completion_walker import find_first
from agent_loop.chat.template import ChatTemplate
from agent_loop.types import ToolCall


@dataclass(frozen=True, slots=True)
class ParsedDelta:
    """Content, reasoning and tool calls that a piece of a completion adds."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __add__(self, other: ParsedDelta) -> ParsedDelta:
        return ParsedDelta.joined([self, other])

    @classmethod
    def joined(cls, deltas: Sequence[ParsedDelta]) -> ParsedDelta:
        """Return the concatenation of several deltas."""
        return cls(
            "".join(delta.content for delta in deltas),
            "".join(delta.reasoning for delta in deltas),
            tuple(call for delta in deltas for call in delta.tool_calls),
        )


class StreamParser:
    """Parses one completion piece by piece.

    Without tools, the text of a call is content. A call that is not valid stays in the content, unchanged. White space
    around the content, and line breaks around reasoning, are removed.
    """

    def __init__(
        self,
        parser: ToolParser,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        prompt_end: str = "",
    ) -> None:
        self._parser = parser
        self._tools = tools
        openings, marks = call_openings(parser), parser.reasoning_marks or (THINK,)
        self._reads_at_end = openings is None
        """Whether the parser can only read whole completions."""
        self._openings = (openings or ()) if tools else ()
        self._reasoning_openings = {each.opening: each for each in marks}
        self._markers = (*self._openings, *self._reasoning_openings, *{each.closing for each in marks})
        self._open_reasoning = None if self._reads_at_end else _opened_by(prompt_end, marks)
        """Marks of the open reasoning block; None outside of reasoning."""
        self._is_label_due = False
        """Whether a label may follow, because a reasoning block has just been opened."""
        self._pending = ""
        """Text that may be the start of a marker."""
        self._text: list[str] = []
        """Text outside of reasoning, unchanged."""
        self._held: list[str] = []
        """Text from the first opening of a call to the end."""
        self._content = _Trimmed(None)
        self._reasoning = _Trimmed("\n")

    def feed(self, text: str) -> ParsedDelta:
        """Parse the next piece of text."""
        if self._held or self._reads_at_end:
            self._held.append(text)
            return ParsedDelta()
        self._pending += text
        content: list[str] = []
        reasoning: list[str] = []
        while not self._held:
            if self._open_reasoning is None:
                has_more = self._parse_content(content)
            else:
                has_more = self._parse_reasoning(self._open_reasoning, reasoning)
            if not has_more:
                break
        return ParsedDelta("".join(content), "".join(reasoning))

    def finish(self) -> ParsedDelta:
        """Parse the text that was held back."""
        if self._reads_at_end:
            return self._parse_whole("".join(self._held))
        if self._open_reasoning is not None:
            return ParsedDelta(reasoning=self._add_reasoning(self._open_reasoning, self._pending))
        if not self._held:
            return ParsedDelta(content=self._add_content(self._pending))
        return self._parse_held("".join(self._held))

    def end_now(self) -> ParsedDelta:
        """Return what `finish` would return, without an effect on the parser."""
        return copy.deepcopy(self, {id(self._parser): self._parser}).finish()

    def _parse_held(self, held: str) -> ParsedDelta:
        """Parse the text from the first opening of a call to the end."""
        parsed = self._parser.read("".join(self._text) + held, tools=self._tools)
        if parsed.calls and not parsed.tool_calls:
            return ParsedDelta(self._content.add(held))
        self._reasoning.begin_block()
        reasoning = self._reasoning.add(parsed.reasoning or "")
        returned = self._content.returned
        rest = parsed.content[len(returned) :] if parsed.content.startswith(returned) else ""
        rest += "".join(f"\n{call.text}" for call in parsed.malformed_calls)
        return ParsedDelta(rest if returned else rest.lstrip(), reasoning, tuple(parsed.tool_calls))

    def _parse_content(self, content: list[str]) -> bool:
        """Parse content up to the next marker. Return whether there was a marker after which parsing continues."""
        start, marker = find_first(self._pending, 0, self._markers)
        if not marker:
            start -= longest_partial_match(self._pending, self._markers)
        content.append(self._add_content(self._pending[:start]))
        if marker in self._openings:
            self._held.append(self._pending[start:])
            self._pending = ""
            return False
        self._pending = self._pending[start + len(marker) :]
        if marker in self._reasoning_openings:
            self._open_reasoning = self._reasoning_openings[marker]
            self._is_label_due = True
            self._reasoning.begin_block()
        return bool(marker)

    def _parse_reasoning(self, marks: ReasoningMarks, reasoning: list[str]) -> bool:
        """Parse reasoning up to its closing mark. Return whether the mark was found."""
        end, closing = find_first(self._pending, 0, (marks.closing,))
        if not closing:
            end -= longest_partial_match(self._pending, (marks.closing,))
            if self._is_label_due and end < len(marks.label):
                return False
        reasoning.append(self._add_reasoning(marks, self._pending[:end]))
        self._pending = self._pending[end + len(closing) :]
        if closing:
            self._open_reasoning = None
        return bool(closing)

    def _add_reasoning(self, marks: ReasoningMarks, text: str) -> str:
        if self._is_label_due:
            text = text.removeprefix(marks.label)
            self._is_label_due = False
        return self._reasoning.add(text)

    def _add_content(self, text: str) -> str:
        self._text.append(text)
        return self._content.add(text)

    def _parse_whole(self, text: str) -> ParsedDelta:
        parsed = self._parser.read(text, tools=self._tools)
        calls = parsed.tool_calls if self._tools else []
        if parsed.calls and not calls:
            return ParsedDelta(text.strip())
        content = "\n".join(
            [*filter(None, [parsed.content]), *(call.text for call in parsed.malformed_calls)]
        )
        return ParsedDelta(content, parsed.reasoning or "", tuple(calls))


class _Trimmed:
    """Streamed text without the surrounding `space`, or any white space. It is held back until more text follows."""

    def __init__(self, space: str | None) -> None:
        self._space = space
        self._separator = ""
        """Text between the last block and the next one."""
        self._is_at_start = True
        self._held_space: list[str] = []
        self._returned: list[str] = []

    @property
    def returned(self) -> str:
        """The whole text returned so far."""
        return "".join(self._returned)

    def begin_block(self) -> None:
        """Start a new block, on a new line."""
        self._is_at_start = True
        self._separator = "\n" if self._returned else ""
        self._held_space.clear()

    def add(self, text: str) -> str:
        """Add text, and return the text that can be sent."""
        if not text.strip(self._space):
            if not self._is_at_start:
                self._held_space.append(text)
            return ""
        before = self._separator if self._is_at_start else "".join(self._held_space)
        text = text.lstrip(self._space) if self._is_at_start else text
        kept = text.rstrip(self._space)
        self._is_at_start = False
        self._held_space = [text[len(kept) :]]
        self._returned.append(before + kept)
        return before + kept


def _opened_by(prompt_end: str, reasoning_marks: Sequence[ReasoningMarks]) -> ReasoningMarks | None:
    """Return the marks of the reasoning block that the prompt opens; None if there is none."""
    end = prompt_end.rstrip()
    for marks in reasoning_marks:
        if end.endswith((marks.opening, marks.opening + marks.label)):
            return marks
    return None


class ContinuedParser:
    """Returns what a turn adds to the content, the reasoning and the calls that its beginning gave.

    The client has the beginning as if it were the whole turn: the start of a marker or of a call is text, and there is
    no white space at the end of the content. What the rest makes of it is neither taken back nor returned twice.

    Args:
        parser: Parser of the whole turn.
        begun: Text of the beginning.
        given: The content as the client has it. White space at its end decides whether white space between the
            beginning and the rest is returned.
    """

    def __init__(self, parser: StreamParser, *, begun: str, given: str) -> None:
        self._parser = parser
        parser.feed(begun)
        ended = parser.end_now()
        space = begun[len(begun.rstrip()) :]
        self._content = _GivenText(ended.content + (space if given.endswith(space) else ""))
        self._reasoning = _GivenText(ended.reasoning)

    def feed(self, text: str) -> ParsedDelta:
        """Parse the next piece of text."""
        return self._rest_of(self._parser.feed(text))

    def finish(self) -> ParsedDelta:
        """Parse the text that was held back."""
        return self._rest_of(self._parser.finish())

    def _rest_of(self, delta: ParsedDelta) -> ParsedDelta:
        content, reasoning = self._content.rest(delta.content), self._reasoning.rest(delta.reasoning)
        return ParsedDelta(content, reasoning, delta.tool_calls)


class _GivenText:
    """Text that the client has, and that the parser has still to return."""

    def __init__(self, text: str) -> None:
        self._left = text

    def rest(self, added: str) -> str:
        """Return the part of the added text that the client does not have."""
        num_given = num_shared(added, self._left)
        is_continued = num_given == min(len(added), len(self._left))
        self._left = self._left[num_given:] if is_continued else ""
        return added[num_given:]


def call_openings(parser: ToolParser) -> tuple[str, ...] | None:
    """Return the texts that may start a tool call, or None if the parser can only read whole completions."""
    openings = parser.stream_stops or ((parser.call_start,) if parser.call_start else ())
    return None if parser.reads_end_tokens else openings or None


class FirstCallEnd:
    """Detector of the end of a turn's first call, for `parallel_tool_calls: false`.

    The text is parsed only where a text that ends calls occurs, since a call may contain that text in a string.
    """

    def __init__(self, template: ChatTemplate, *, tools: Sequence[Mapping[str, Any]], prefix: str) -> None:
        self._parser = template.tool_parser
        self._tools = tools
        self._stream = StreamDetokenizer(template.encoder.decode)
        self._text = prefix
        self._ends = self._parser.first_call_ends
        self._longest = max(map(len, self._ends))

    def __call__(self, token_ids: Sequence[int]) -> bool:
        """Add tokens, and return whether they complete the first call."""
        added = self._stream.feed(token_ids)
        self._text += added
        recent = self._text[-(len(added) + self._longest - 1) :]
        if not added or not any(end in recent for end in self._ends):
            return False
        return bool(self._parser.parse(self._text, tools=self._tools).tool_calls)

"""Parses the rest of a turn whose beginning the client has already."""

from __future__ import annotations

from agent_loop.chat.encoding import num_shared
from agent_loop.completions.stream_parser import ParsedDelta, StreamParser


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

"""Parsing of a completion in one pass: reasoning is separated, calls are parsed, all other text is kept."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from msgspec import Struct

from agent_loop.types import MalformedCall, ParsedCompletion, ToolCall


class ReasoningMarks(NamedTuple):
    """Texts around reasoning in a format."""

    opening: str
    closing: str
    label: str = ""
    """Text directly after the opening that is not part of the reasoning."""


MAX_ERROR_LENGTH = 400
"""Maximum length of the error of a malformed call, in characters."""
MAX_NAME_LENGTH = 60
"""Maximum length of a name in an error, in characters."""

THINK = ReasoningMarks("<think>", "</think>")


class CallBlock(Struct, frozen=True):
    """Result of a block reader."""

    calls: tuple[ToolCall | MalformedCall, ...]
    end: int
    """Position at which parsing continues."""
    text: str = ""
    """Text of the block that is content, and not a call."""


Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""OpenAI function schemas."""
BlockReader: TypeAlias = Callable[[str, int, Tools], CallBlock]
"""Parses a block. Called with the completion, the position after the text that opens the block, and the tools."""


class CompletionWalker:
    """Parses completions of one format from left to right.

    A closing of reasoning without an opening, outside of calls, ends reasoning that the generation prompt opened. The
    first such closing makes all text before it reasoning, calls included. Reasoning without a closing extends to the
    end.

    Args:
        readers: Block readers by the text that opens a call.
        reasoning_marks: Texts around reasoning.
        ignored: Texts of the format that are left out of the content.
        ends: Texts that end a turn. One of them is left out at the end of the completion.
    """

    def __init__(
        self,
        readers: Mapping[str, BlockReader],
        *,
        reasoning_marks: tuple[ReasoningMarks, ...] = (THINK,),
        ignored: tuple[str, ...] = (),
        ends: tuple[str, ...] = (),
    ) -> None:
        self._readers = readers
        self._reasoning_marks = {thought.opening: thought for thought in reasoning_marks}
        self._closings = {thought.closing for thought in reasoning_marks}
        self._marker = _pattern((*readers, *self._reasoning_marks, *self._closings, *ignored))
        self._ends = ends

    def read(self, text: str, *, tools: Tools = ()) -> ParsedCompletion:
        """Parse a completion."""
        text = self._without_end(text)
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCall | MalformedCall] = []
        position = 0
        while found := self._marker.search(text, position):
            marker = found[0]
            content.append(text[position : found.start()])
            position = found.end()
            if marker in self._readers:
                block = self._readers[marker](text, position, tools)
                calls += block.calls
                content.append(block.text)
                position = block.end
            elif marker in self._reasoning_marks:
                _, closing, label = self._reasoning_marks[marker]
                end, closed = find_first(text, position, (closing,))
                reasoning.append(text[position:end].removeprefix(label).strip("\n"))
                position = end + len(closed)
            elif marker in self._closings and reasoning:
                content.append(marker)
            elif marker in self._closings:
                reasoning.append(text[: found.start()].strip("\n"))
                content.clear()
                calls.clear()
        content.append(text[position:])
        return ParsedCompletion(
            "".join(content).strip(), tuple(calls), "\n".join(reasoning) if reasoning else None
        )

    def _without_end(self, text: str) -> str:
        stripped = text.rstrip()
        for end in self._ends:
            if stripped.endswith(end):
                return stripped.removesuffix(end)
        return text


def find_first(text: str, start: int, markers: tuple[str, ...]) -> tuple[int, str]:
    """Return the position of the first marker and the marker, or the end of the text and "" if there is none."""
    found = _pattern(markers).search(text, start)
    return (found.start(), found[0]) if found else (len(text), "")


def skip_space(text: str, start: int) -> int:
    """Return the position of the first character that is not white space."""
    found = _NO_SPACE.search(text, start)
    return found.start() if found else len(text)


def malformed(text: str, error: str) -> MalformedCall:
    """Return a malformed call. Its error, which is the model's reply, is one line of bounded length."""
    printable = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in error)
    return MalformedCall(text=text.strip(), error=shortened(printable, max_length=MAX_ERROR_LENGTH))


def broken_call(text: str, start: int, error: str, *, closing: str, stops: tuple[str, ...]) -> CallBlock:
    """Return the block of a malformed call: up to its closing, or before the first of `stops`."""
    end, marker = find_first(text, start, (closing, *stops))
    if marker == closing:
        return CallBlock((malformed(text[start:end], error),), end + len(marker))
    return CallBlock((malformed(text[start:end], f"{error}; the call is not closed with {closing}"),), end)


def quoted(name: str) -> str:
    """Return a name that the model wrote, for an error: quoted, escaped and shortened."""
    return repr(shortened(name))


def shortened(text: str, *, max_length: int = MAX_NAME_LENGTH) -> str:
    """Return the text, cut to `max_length` characters."""
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."


_NO_SPACE = re.compile(r"\S")


@lru_cache(maxsize=256)
def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(marker) for marker in sorted(markers, key=len, reverse=True)))

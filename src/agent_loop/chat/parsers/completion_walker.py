"""Walking a completion once: reasoning set apart, calls read where they open, everything else kept as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from msgspec import Struct

from agent_loop.types import MalformedCall, ParsedCompletion, ToolCall


class ReasoningMarks(NamedTuple):
    """How a format marks reasoning."""

    opening: str
    closing: str
    label: str = ""
    """What stands right behind the opening and is no reasoning."""


MAX_ERROR_LENGTH = 400
"""Characters of what is said of a call that cannot be read."""
MAX_NAME_LENGTH = 60
"""Characters of a name in it."""

THINK = ReasoningMarks("<think>", "</think>")


class CallBlock(Struct, frozen=True):
    """What a reader found behind an opening text."""

    calls: tuple[ToolCall | MalformedCall, ...]
    end: int
    """Where the walk goes on."""
    text: str = ""
    """What of it was no call after all, for the content."""


BlockReader: TypeAlias = Callable[[str, int], CallBlock]
"""Reads what an opening text opened: given the completion and the position right behind that text."""


class CompletionWalker:
    """Reads completions of one format from left to right.

    The first closing of reasoning that nothing opened, and that is not inside a call, ends reasoning that the
    generation prompt opened: all before it is reasoning, calls included. Reasoning that is never closed goes on to
    the end.

    Args:
        readers: By the text that opens a call.
        reasoning_marks: What marks reasoning.
        ignored: Texts of the format that say nothing by themselves and are left out of the content.
        ends: Texts that end a turn; one at the end is left out.
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

    def read(self, text: str) -> ParsedCompletion:
        """Reads a completion."""
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
                block = self._readers[marker](text, position)
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
    """Where the first of some texts stands, and which; the end of the text and "" if there is none."""
    found = _pattern(markers).search(text, start)
    return (found.start(), found[0]) if found else (len(text), "")


def skip_space(text: str, start: int) -> int:
    """The position of the first character that is no white space."""
    found = _NO_SPACE.search(text, start)
    return found.start() if found else len(text)


def malformed(text: str, error: str) -> MalformedCall:
    """Return a call that cannot be read, with an error of one bounded line: the model is answered with it."""
    printable = error if error.isprintable() else "".join(map(_printable, error))
    return MalformedCall(text=text.strip(), error=shortened(printable, max_length=MAX_ERROR_LENGTH))


def quoted(name: str) -> str:
    """Return a name that the model wrote, for an error: quoted, escaped and shortened."""
    return repr(shortened(name))


def shortened(text: str, *, max_length: int = MAX_NAME_LENGTH) -> str:
    """Return the text, cut to `max_length` characters."""
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."


def _printable(char: str) -> str:
    return char if char.isprintable() else char.encode("unicode_escape").decode()


_NO_SPACE = re.compile(r"\S")


@lru_cache(maxsize=256)
def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(marker) for marker in sorted(markers, key=len, reverse=True)))

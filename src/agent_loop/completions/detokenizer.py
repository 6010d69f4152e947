"""Token ids to text while they come: whole characters only, and an end where a stop text begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are no character, or not yet."""

MAX_HELD_TOKENS = 64
"""Longer runs of tokens without the end of a character hold no text that could still come."""


class StreamDetokenizer:
    """Decodes a completion in parts, each with the context of the part before: some decoders treat a first word
    otherwise. The work per part depends on it and the one before alone.

    Args:
        decode: The tokenizer's decoder.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._num_context = 0
        """The first so many tokens have been given out in full."""
        self._given = 0
        """Characters of all the tokens that have been given out."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        self._ids += token_ids
        text = self._decode(self._ids)
        end = len(text.rstrip(REPLACEMENT))
        if end < len(text) and len(self._ids) <= self._num_context + MAX_HELD_TOKENS:
            added, self._given = text[self._given : end], max(self._given, end)
            return added
        added = text[self._given :]
        # Tokens without text are forgotten, so that a run of them costs no more than other tokens.
        self._ids = self._ids[self._num_context :] if added else self._ids[: self._num_context]
        self._num_context = len(self._ids)
        self._given = len(self._decode(self._ids))
        return added

    def finish(self) -> str:
        """What was held back because its last character is not whole."""
        text = self._decode(self._ids)
        added, self._given = text[self._given :], len(text)
        return added


class StopTextMatcher:
    """Ends a text where the first of some texts begins.

    Args:
        stops: None of them is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None
        """The one that was found; nothing more comes."""

    @property
    def is_hit(self) -> bool:
        return self.hit is not None

    def feed(self, text: str) -> str:
        """What of the text so far cannot be the beginning of a stop text any more."""
        if not self._stops or self.is_hit:
            return "" if self.is_hit else text
        text = self._held + text
        starts = {start: stop for stop in self._stops if (start := text.find(stop)) >= 0}
        if starts:
            self.hit, self._held = starts[min(starts)], ""
            return text[: min(starts)]
        held = longest_partial_match(text, self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back."""
        text, self._held = self._held, ""
        return text


def longest_partial_match(text: str, words: Sequence[str]) -> int:
    """How many characters at the end of the text could be the beginning of one of the words."""
    longest = min(len(text), max((len(word) for word in words), default=1) - 1)
    for length in range(longest, 0, -1):
        end = text[len(text) - length :]
        if any(word.startswith(end) and len(word) > length for word in words):
            return length
    return 0

"""Incremental detokenization of a completion, and matching of stop texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from agent_loop.token_chunks import TokenChunk

REPLACEMENT = "\ufffd"
"""Character that decoders write for bytes that are not valid UTF-8, or not yet complete."""

MAX_CONTEXT_TOKENS = 16
"""Number of tokens before a completion that are decoded with it."""

MAX_HELD_TOKENS = 64
"""Maximum number of tokens that are held back for an incomplete character."""


class StreamDetokenizer:
    """Decodes a completion piece by piece, and returns only complete characters.

    Each piece is decoded together with the piece before, because some decoders treat the first word differently. The
    cost of a piece does not depend on the length of the completion.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._num_context = 0
        """Number of tokens in `_ids` whose text has been returned completely."""
        self._num_returned = 0
        """Number of characters of the text of `_ids` that have been returned."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the text that they complete."""
        self._ids += token_ids
        text = self._decode(self._ids)
        end = len(text.rstrip(REPLACEMENT))
        if end < len(text) and len(self._ids) <= self._num_context + MAX_HELD_TOKENS:
            added, self._num_returned = text[self._num_returned : end], max(self._num_returned, end)
            return added
        added = text[self._num_returned :]
        # Tokens without text are dropped, so that a long run of them stays cheap.
        self._ids = self._ids[self._num_context :] if added else self._ids[: self._num_context]
        self._num_context = len(self._ids)
        self._num_returned = len(self._decode(self._ids))
        return added

    def finish(self) -> str:
        """Return the text that was held back because its last character is incomplete."""
        text = self._decode(self._ids)
        added, self._num_returned = text[self._num_returned :], len(text)
        return added


class StopTextMatcher:
    """Cuts a streamed text before the first stop text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None
        """Stop text that was found; None if there was none."""

    @property
    def is_hit(self) -> bool:
        return self.hit is not None

    def feed(self, text: str) -> str:
        """Add text, and return the text that cannot be part of a stop text. Return nothing after a match."""
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
        """Return the text that was held back."""
        text, self._held = self._held, ""
        return text


class StopTextEnd:
    """Ends a completion with the first token that completes a stop text.

    Args:
        stops: Stop texts, which must not be empty.
        decode: Decoder of the tokenizer.
        before: Tokens before the completion. Some decoders treat the first word differently.
        num_sampled: Number of tokens at the end of `before` that belong to the completion.
    """

    def __init__(
        self,
        stops: Sequence[str],
        *,
        decode: Callable[[Sequence[int]], str],
        before: Sequence[int] = (),
        num_sampled: int = 0,
    ) -> None:
        self._matcher = StopTextMatcher(stops)
        self._stream = StreamDetokenizer(decode)
        start = max(0, len(before) - num_sampled)
        self._stream.feed(before[max(0, start - MAX_CONTEXT_TOKENS) : start])
        self._matcher.feed(self._stream.feed(before[start:]))

    def cut(self, chunk: TokenChunk) -> TokenChunk:
        """Return the next chunk of the completion, cut after a stop text and with the stop reason `stop`."""
        pieces: list[TokenChunk] = []
        for piece in chunk.single_tokens():
            self._matcher.feed(self._stream.feed(piece.token_ids))
            if self._matcher.is_hit:
                return TokenChunk.joined([*pieces, replace(piece, stop_reason="stop")])
            pieces.append(piece)
        return chunk


def longest_partial_match(text: str, words: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that is a proper prefix of one of `words`."""
    longest = min(len(text), max((len(word) for word in words), default=1) - 1)
    for length in range(longest, 0, -1):
        end = text[len(text) - length :]
        if any(word.startswith(end) and len(word) > length for word in words):
            return length
    return 0

"""Truncation of tool responses to a number of tokens, with a marker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

TruncateSide: TypeAlias = Literal["left", "right", "middle"]
"""Part of the text that is kept: `left` keeps its beginning, `right` its end, `middle` both ends."""

MARKERS: dict[TruncateSide, str] = {
    "left": "...(truncated)",
    "right": "(truncated)...",
    "middle": "...(truncated)...",
}

_WINDOW_CHARS_PER_TOKEN = 32
"""Characters per token of the part that is encoded. Of a much longer text, only the two ends are encoded."""
_CUT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""Character that decoding produces where the cut falls inside a character."""


def truncate_tokens(
    text: str,
    *,
    max_tokens: int,
    side: TruncateSide,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[list[int]], str],
) -> tuple[str, bool]:
    """Return the text in at most `max_tokens` tokens, including the marker, and whether it was truncated.

    A text within the limit is returned unchanged. The result is encoded again to check its length, so the limit also
    holds for tokenizers that merge tokens across the cut. If the limit is too small for the marker, the text is
    truncated without a marker.
    """
    # A text has at most as many tokens as bytes, plus a special token at the start.
    if len(text.encode(errors="replace")) < max_tokens:
        return text, False
    head_ids, tail_ids = _encode_ends(text, max_tokens=max_tokens, encode=encode)
    if len(head_ids) <= max_tokens:
        return text, False
    marker = MARKERS[side]
    num_marker_tokens = len(encode(marker))
    if num_marker_tokens >= max_tokens:
        marker, num_marker_tokens = "", 0
    num_kept = max_tokens - num_marker_tokens
    while num_kept > 0:
        num_head = {"left": num_kept, "right": 0, "middle": (num_kept + 1) // 2}[side]
        num_tail = num_kept - num_head
        head = decode(list(head_ids[:num_head])).rstrip(_CUT_CHARACTER) if num_head else ""
        tail = decode(list(tail_ids[-num_tail:])).lstrip(_CUT_CHARACTER) if num_tail else ""
        shortened = head + marker + tail
        excess = len(encode(shortened)) - max_tokens
        if excess <= 0:
            return shortened, True
        num_kept -= excess
    return marker, True


def _encode_ends(
    text: str, *, max_tokens: int, encode: Callable[[str], Sequence[int]]
) -> tuple[Sequence[int], Sequence[int]]:
    """Return token ids of the beginning and of the end; for all but very long texts, both are those of the whole."""
    window = _WINDOW_CHARS_PER_TOKEN * (max_tokens + 1)
    if len(text) > 2 * window:
        head_ids, tail_ids = encode(text[:window]), encode(text[-window:])
        if len(head_ids) > max_tokens and len(tail_ids) > max_tokens:
            return head_ids, tail_ids
    ids = encode(text)
    return ids, ids

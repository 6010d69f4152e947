"""Cuts of a text at the start of a line. The texts on the two sides are encoded separately.

A byte-level tokenizer splits a text into pieces by a pattern, from left to right, and encodes each piece alone. With
the patterns here, a piece always ends between a newline and a visible character of ASCII other than a slash:

- The only alternatives that can contain a newline are white space and punctuation with newlines (or slashes) behind it.
  None of them can continue with such a character behind a newline.
- The patterns do not look back, so the pieces after the cut depend on the text after the cut alone.
- They look ahead by one character, so the pieces before the cut depend on the text before the cut and that character.
"""

from __future__ import annotations

import re

from agent_loop.chat.byte_level import GPT2_PATTERN

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_MARK = r" ?[^\s\p{L}\p{N}]+"
_PATTERNS = frozenset(
    {
        GPT2_PATTERN,
        # Qwen2, Qwen2.5, Qwen3
        rf"{_CONTRACTIONS}|{_BEFORE_WORD}\p{{L}}+|\p{{N}}|{_MARK}[\r\n]*|{_SPACES}",
        # Qwen3.5
        rf"{_CONTRACTIONS}|{_BEFORE_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        # Llama 3, GLM 4
        rf"{_CONTRACTIONS}|{_BEFORE_WORD}\p{{L}}+|\p{{N}}{{1,3}}|{_MARK}[\r\n]*|{_SPACES}",
        # gpt-oss
        rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE_WORD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
        rf"|\p{{N}}{{1,3}}|{_MARK}[\r\n/]*|{_SPACES}",
    }
)
_LINE_START = re.compile(r"(?<=\n)[!-.0-?A-~]")
"""A line that starts with `@` may start with a mask, which stands for any character."""


def cuts_lines(pattern: str) -> bool:
    """Return whether a pattern is known to end a piece at the start of a line."""
    return pattern in _PATTERNS


def first_line_start(text: str) -> int | None:
    """Return the position of the first cut in a text, or None if there is none."""
    found = _LINE_START.search(text)
    return None if found is None else found.start()


def last_line_start(text: str) -> int | None:
    """Return the position of the last cut in a text, or None if there is none."""
    end = len(text)
    while (end := text.rfind("\n", 0, end)) >= 0:
        if _LINE_START.match(text, end + 1):
            return end + 1
    return None

"""Check of whether two regular-expression engines split texts at the same positions, character by character.

The engines implement different versions of Unicode. A pattern depends only on the classes of a character. So two
engines that split a character equally beside one character of each kind split the character equally everywhere.
"""

from __future__ import annotations

import unicodedata
from itertools import product
from typing import Any, cast

import tiktoken
from tokenizers import Tokenizer, models

from agent_loop.chat.byte_level import CHARS, bytes_of

_AROUND = "aA0 \n.'s"
"""One character of each kind that patterns distinguish, and the letters of a contraction."""
_LEADING, _CONTINUING = range(0xC2, 0xF5), range(0x80, 0xC0)
_IDEOGRAPH = "\u4e2d"


class SplitCheck:
    """Compares the splits of the pre-tokenizer of `tokenizers` and of a pattern of `tiktoken`.

    Both encode with a small vocabulary that joins the last byte of any character and the first byte of the next, so
    that every split shows in the ids.

    Args:
        tokenizer: Tokenizer with the pre-tokenizer.
        pattern: Pattern for `tiktoken`.
    """

    def __init__(self, tokenizer: Tokenizer, *, pattern: str) -> None:
        pairs = _pairs()
        tokens = sorted(CHARS) + [left + right for left, right in pairs]
        ids = {token: token_id for token_id, token in enumerate(tokens)}
        self._expected = Tokenizer(models.BPE(vocab=ids, merges=pairs))
        cast(Any, self._expected).pre_tokenizer = tokenizer.pre_tokenizer
        ranks = {bytes_of(token): token_id for token, token_id in ids.items()}
        self._encoding = tiktoken.Encoding("toy", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        self._equal: set[str] = set()
        self._unequal: set[str] = set()

    def covers(self, text: str) -> bool:
        """Return whether both split every character of a text equally."""
        if self._equal.issuperset(text):
            return True
        for char in set(text) - self._equal - self._unequal:
            (self._equal if self._is_equal(char) else self._unequal).add(char)
        return self._unequal.isdisjoint(text)

    def agree_on(self, text: str) -> bool:
        """Return whether both split this text equally."""
        expected = self._expected.encode(text, add_special_tokens=False).ids
        return self._encoding.encode_ordinary(text) == expected

    def _is_equal(self, char: str) -> bool:
        """Return whether both split a character equally. The answer is False for characters that Python's Unicode does
        not know, since Python may not know their composed form."""
        if unicodedata.category(char) in ("Cn", "Cs"):
            return False
        beside = "".join(f"{other}{char}{other}{char}{char}" for other in f"{_AROUND}{_IDEOGRAPH}")
        return self.agree_on(f"{char}{beside}a{char}A{char}a'{char} {char}a")


def _pairs() -> list[tuple[str, str]]:
    """Return all pairs of the last byte of a character and the first of the next, as byte-level vocabularies write
    them."""
    ascii_bytes = [ord(char) for char in _AROUND]
    beside = [*product(ascii_bytes, _LEADING), *product(_CONTINUING, [*ascii_bytes, *_LEADING])]
    char_of = {bytes_of(char)[0]: char for char in CHARS}
    return [(char_of[left], char_of[right]) for left, right in [*beside, *product(ascii_bytes, repeat=2)]]

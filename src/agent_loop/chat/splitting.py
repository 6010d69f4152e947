"""Whether two engines split texts at the same places, found out character by character.

Engines know different versions of Unicode. A pattern sees no more of a character than the classes it is in, so a
character that is split alike beside one of each kind is split alike everywhere.
"""

from __future__ import annotations

import unicodedata
from itertools import product
from typing import Any, cast

import tiktoken
from tokenizers import Tokenizer, models

from agent_loop.chat.byte_level import CHARS, bytes_of

_AROUND = "aA0 \n.'s"
"""One character of each kind that patterns tell apart, and the letters of a contraction."""
_LEADING, _CONTINUING = range(0xC2, 0xF5), range(0x80, 0xC0)
_IDEOGRAPH = "\u4e2d"


class SplitProof:
    """Compares where texts are split by the pre-tokenizer of `tokenizers` and by a pattern given to `tiktoken`.

    Both encode with a toy vocabulary that joins the last byte of a character and the first of the next, whatever they
    are, so that every split shows in the ids.

    Args:
        tokenizer: Its pre-tokenizer is taken.
        pattern: What `tiktoken` splits by.
    """

    def __init__(self, tokenizer: Tokenizer, *, pattern: str) -> None:
        pairs = _pairs()
        tokens = sorted(CHARS) + [left + right for left, right in pairs]
        ids = {token: token_id for token_id, token in enumerate(tokens)}
        self._expected = Tokenizer(models.BPE(vocab=ids, merges=pairs))
        cast(Any, self._expected).pre_tokenizer = tokenizer.pre_tokenizer
        ranks = {bytes_of(token): token_id for token, token_id in ids.items()}
        self._encoding = tiktoken.Encoding("toy", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        self._proved: set[str] = set()
        self._refused: set[str] = set()

    def covers(self, text: str) -> bool:
        """Whether every character of a text is split alike by both."""
        if self._proved.issuperset(text):
            return True
        for char in set(text) - self._proved - self._refused:
            (self._proved if self._is_alike(char) else self._refused).add(char)
        return self._refused.isdisjoint(text)

    def agree_on(self, text: str) -> bool:
        """Whether this text is split alike by both."""
        expected = self._expected.encode(text, add_special_tokens=False).ids
        return self._encoding.encode_ordinary(text) == expected

    def _is_alike(self, char: str) -> bool:
        """Characters that Python does not know yet are refused: their composed form may be unknown to it too."""
        if unicodedata.category(char) in ("Cn", "Cs"):
            return False
        beside = "".join(f"{other}{char}{other}{char}{char}" for other in f"{_AROUND}{_IDEOGRAPH}")
        return self.agree_on(f"{char}{beside}a{char}A{char}a'{char} {char}a")


def _pairs() -> list[tuple[str, str]]:
    """The last byte of a character and the first of the next, as byte-level vocabularies write them."""
    ascii_bytes = [ord(char) for char in _AROUND]
    beside = [*product(ascii_bytes, _LEADING), *product(_CONTINUING, [*ascii_bytes, *_LEADING])]
    char_of = {bytes_of(char)[0]: char for char in CHARS}
    return [(char_of[left], char_of[right]) for left, right in [*beside, *product(ascii_bytes, repeat=2)]]

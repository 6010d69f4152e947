"""Byte-level BPE with `tiktoken`, which is several times faster than `tokenizers` and returns the same ids."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import tiktoken
from tokenizers import Tokenizer

from agent_loop.chat.byte_level import ByteLevelBpe, OtherTokenizer, read_byte_level
from agent_loop.chat.encoder_probes import encoder_probes
from agent_loop.chat.line_cuts import cuts_lines
from agent_loop.chat.split_check import SplitCheck

MAX_KEPT = 8
"""Number of encoders that are kept for tokenizers equal to an earlier one."""

MAX_CHARACTERS = 250_000
"""Longest text that is encoded at once; `tiktoken`'s search for its pattern fails on a million spaces."""

_ASCII = "".join(map(chr, range(128)))
_kept: dict[bytes, TiktokenEncoder | str] = {}


def tiktoken_encoder(tokenizer: Tokenizer) -> TiktokenEncoder:
    """Return an encoder that returns the tokenizer's own ids, verified on probes.

    Raises:
        OtherTokenizer: `tiktoken` does not support the tokenizer. The message is the reason.
    """
    key = blake2b(tokenizer.to_str().encode()).digest()
    if key not in _kept:
        if len(_kept) >= MAX_KEPT:
            _kept.clear()
        try:
            _kept[key] = _verified(
                TiktokenEncoder(read_byte_level(tokenizer), tokenizer=tokenizer), tokenizer
            )
        except OtherTokenizer as error:
            _kept[key] = str(error)
    kept = _kept[key]
    if isinstance(kept, str):
        raise OtherTokenizer(kept)
    return kept


class TiktokenEncoder:
    """Encodes and decodes like a tokenizer of `tokenizers`.

    Args:
        parts: Parts of the tokenizer.
        tokenizer: The tokenizer, for its normaliser and its pre-tokenizer.

    Raises:
        OtherTokenizer: `tiktoken` refuses the pattern of the tokenizer.
    """

    def __init__(self, parts: ByteLevelBpe, *, tokenizer: Tokenizer) -> None:
        self._control_ids = parts.control_ids
        self.token_bytes = parts.token_bytes
        """Bytes of the tokens by id; empty for ids without a token."""
        self.cuts_lines = cuts_lines(parts.pattern) and "\n" not in "".join(parts.control_ids)
        """Whether texts before and after the start of a line are encoded separately; see `line_cuts`."""
        self._normalizer: Any = tokenizer.normalizer if parts.is_composed else None
        longest_first = sorted(map(re.escape, parts.control_ids), key=len, reverse=True)
        self._controls = re.compile(f"({'|'.join(longest_first)})")
        self._first_characters = {text[0] for text in parts.control_ids}
        try:
            self._encoding = tiktoken.Encoding(
                "byte-level", pat_str=parts.pattern, mergeable_ranks=dict(parts.ranks), special_tokens={}
            )
        except ValueError as error:
            raise OtherTokenizer(f"tiktoken refuses its pattern: {error}") from error
        self._splits = SplitCheck(tokenizer, pattern=parts.pattern)
        if not self._splits.covers(_ASCII):
            raise OtherTokenizer("tiktoken splits ASCII text at other positions")

    def encode(self, text: str, *, read: Callable[[str], str] = str) -> list[int] | None:
        """Return the token ids of a text with control tokens, or None if the ids may differ from the tokenizer's.

        Args:
            text: The text.
            read: Applied to each stretch between control tokens before the stretch is encoded.
        """
        may_hold_controls = any(map(text.__contains__, self._first_characters))
        stretches = self._controls.split(text) if may_hold_controls else [text]
        ids: list[int] = []
        for number, stretch in enumerate(stretches):
            if number % 2:
                ids.append(self._control_ids[stretch])
            elif stretch:
                text_ids = self.encode_text(read(stretch))
                if text_ids is None:
                    return None
                ids += text_ids
        return ids

    def encode_text(self, text: str) -> list[int] | None:
        """Return the token ids of text without control tokens, or None if the ids may differ from the tokenizer's."""
        if len(text) > MAX_CHARACTERS:
            return None
        if not text.isascii():
            if not self._splits.covers(text):
                return None
            if self._normalizer is not None and not unicodedata.is_normalized("NFC", text):
                text = self._normalizer.normalize_str(text)
        return self._encoding.encode_ordinary(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids. Unknown ids are left out."""
        known = self.token_bytes
        try:
            text = b"".join(map(known.__getitem__, token_ids))
        except IndexError:
            text = b"".join([known[token_id] for token_id in token_ids if token_id < len(known)])
        return text.decode("utf-8", "replace")


def _verified(encoder: TiktokenEncoder, tokenizer: Tokenizer) -> TiktokenEncoder:
    for probe in encoder_probes([token.content for token in tokenizer.get_added_tokens_decoder().values()]):
        expected = tokenizer.encode(probe, add_special_tokens=False).ids
        ids = encoder.encode(probe)
        if ids not in (expected, None):
            raise OtherTokenizer(f"its ids of {probe!r} are {expected}, but tiktoken's are {ids}")
        decoded = tokenizer.decode(expected, skip_special_tokens=False)
        if encoder.decode(expected) != decoded:
            raise OtherTokenizer(f"it decodes {expected} to {decoded!r}, not to {encoder.decode(expected)!r}")
    return encoder
